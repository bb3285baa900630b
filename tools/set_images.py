"""Write the images' names of `k8s/images.yaml` everywhere: `python -m tools.set_images [--registry R] [--version V] [--check]`.

A line that names an image ends with `# images.yaml: <key>`, in manifests and in the YAML inside of ConfigMaps, which the
field `images` of kustomize does not reach. With --registry or --version the names of our own images change in
`k8s/images.yaml` first.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"^(?P<before>.*?:\s+)(?P<image>[^\s#]+)(?P<after>\s+# images\.yaml: (?P<key>\S+)\s*)$")
OURS = re.compile(r"^(?:.*/)?roundhouse/(?P<role>flow|gym|engine|trainer)[:@](?P<tag>\S+)$")


def files(root: Path) -> list[Path]:
    """Where images may be named."""
    return [
        root / "prefect.yaml",
        *sorted(path for path in (root / "k8s").rglob("*.yaml") if path.name != "images.yaml"),
    ]


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Key and image of each marked line."""
    for line in text.splitlines():
        if (found := MARKED.match(line)) is not None:
            yield found["key"], found["image"]


def with_images(text: str, images: dict[str, str]) -> str:
    """The text with the image of its key in each marked line.

    Raises:
        KeyError: a line names a key that there is not.
    """

    def line_of(line: str) -> str:
        found = MARKED.match(line)
        return line if found is None else f"{found['before']}{images[found['key']]}{found['after']}"

    return "".join(line_of(line) for line in text.splitlines(keepends=True))


def renamed(images: dict[str, str], registry: str | None, version: str | None) -> dict[str, str]:
    """The images with ours at another registry or version; the key's device stays the tag's end."""
    names = dict(images)
    for key, image in images.items():
        if (found := OURS.match(image)) is None:
            continue
        name = (
            image.rsplit(found["tag"], 1)[0].rstrip(":@")
            if registry is None
            else f"{registry}/roundhouse/{found['role']}"
        )
        device = "".join(f"-{part}" for part in key.split("-")[1:])
        names[key] = f"{name}:{found['tag'] if version is None else version + device}"
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", help="of our own images, such as registry.example.org/team")
    parser.add_argument("--version", help="of our own images")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file would change")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    source = arguments.root / "k8s/images.yaml"
    text = source.read_text()
    before = yaml.safe_load(text)
    images = renamed(before, arguments.registry, arguments.version)
    for key, image in images.items():
        text = re.sub(rf"(?m)^{key}: .*$", f"{key}: {image}", text)
    contents = {source: text} | {path: with_images(path.read_text(), images) for path in files(arguments.root)}
    changed = [path for path, content in contents.items() if path.read_text() != content]
    for path in changed:
        print(path.relative_to(arguments.root))
        if not arguments.check:
            path.write_text(contents[path])
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
