"""Names in the pages of the root and of docs/ exist: files, headings, commands with their options, targets of make, modules,
keys; and each configuration block loads."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from roundhouse.cli import app
from roundhouse.config.loading import load_config, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.stages.datasets import TaskDraw
from tests.sql.stores import write_dataset, write_run
from tools.docs_site import with_links_of_site

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FILE = re.compile(
    r"(?<![\w./-])((?:roundhouse|flows|tasks|tests|benchmarks|configs|docs|k8s|images|tools)/(?:[\w.*-]+/)*"
    r"(?:(?!mine\.)[\w*-]+\.(?:py|sh|yaml|md|json|png)\b)?)(?![\w…<-])"
)
"""A file or, with its slash, a folder of the repository; a reader's own is called `mine`."""


def code(text: str) -> Iterator[str]:
    """Lines of blocks and spans of code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    yield from (line for block in fenced for line in block.splitlines())
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"^    (.+)$", rest, re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


def blocks(text: str) -> Iterator[str]:
    """Whole blocks of code."""
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from map(textwrap.dedent, re.findall(r"(?:^    .*\n|^\n(?=    ))+", rest, re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    kept = ("".join(each for each in title.lower() if each.isalnum() or each in " -_") for title in titles)
    return {title.replace(" ", "-") for title in kept}


def dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def wrong_commands(line: str) -> Iterator[str]:
    """Yield the unknown `roundhouse` commands and options of a line. `a | b` are two of one group."""
    for said in re.findall(r"(?:^|· +)(?:\.venv/bin/)?roundhouse ([a-z][^#·]*)", line.replace("\\|", "|")):
        first, *others = (part.split() for part in said.split(" | "))
        path, command = follow(first)
        for words in [first, *([*path[:-1], *other] for other in others)]:
            path, command = follow(words)
            if hasattr(command, "commands") or not path:
                yield f"roundhouse {' '.join(words)}"
                continue
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            asked = re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", " ".join(words[len(path) :]))
            yield from (f"roundhouse {' '.join(path)} {name}" for name in asked if name not in known | {"--help"})


def follow(words: list[str]) -> tuple[list[str], Any]:
    """The command that the words begin with, and its name in words."""
    command, path = group(), list[str]()
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        path.append(word)
        command = inner
    return path, command


@cache
def group() -> Any:
    return typer.main.get_command(app)


@cache
def keys() -> frozenset[str]:
    """Every path of a key of a run's configuration, in whichever form of its section."""
    schema = RunConfig.model_json_schema()
    return frozenset(_keys("", schema, schema["$defs"]))


def _keys(path: str, schema: dict[str, Any], defs: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = defs[schema["$ref"].rsplit("/", 1)[1]]
    for form in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from _keys(path, form, defs)
    for name, key in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from _keys(f"{path}{name}.", key, defs)


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_every_command_is_there_with_its_options(page: Path) -> None:
    assert [wrong for line in code(page.read_text()) for wrong in wrong_commands(line)] == []


def test_every_target_of_make_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for line in code(page.read_text()) for name in re.findall(r"^make ([a-z0-9-]+)(?![a-z0-9…-])", line)}
    assert named - targets == set()


def test_the_workflows_of_a_forge_call_targets_of_make_that_are_there() -> None:
    commands = [
        step["run"]
        for file in WORKFLOWS
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"make check", "make test", "make test-nightly"} <= set(commands)
    assert {command for command in commands if command.startswith("make ")} <= {f"make {name}" for name in targets}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(["index.md", *pages])


@pytest.mark.parametrize(
    ("folder", "forge", "link", "site"),
    [
        ("", None, "[a](docs/training.md#loss)", "[a](training.md#loss)"),
        ("docs", None, "[a](training.md)", "[a](training.md)"),
        ("docs", None, "[`train`](../flows/train.py)", "`train`"),
        (
            "docs",
            "https://forge.test/r/",
            "[a](../flows/train.py)",
            "[a](https://forge.test/r/blob/main/flows/train.py)",
        ),
        ("docs/guides", None, "[a](../../README.md)", "[a](../index.md)"),
        ("docs", None, "[a](https://forge.test/x)", "[a](https://forge.test/x)"),
        ("docs", None, "[a](../nowhere.py)", "[a](../nowhere.py)"),
    ],
)
def test_a_link_of_a_page_is_resolved_in_the_site(folder: str, forge: str | None, link: str, site: str) -> None:
    assert with_links_of_site(link, folder, forge) == site


def test_every_module_and_every_file_is_there(page: Path) -> None:
    lines = list(code(page.read_text()))
    modules = {name for line in lines for name in re.findall(r"python -m ([\w.]+)", line)}
    assert {name for name in modules if importlib.util.find_spec(name) is None} == set()
    files = {name for line in lines for name in re.findall(FILE, line)}
    assert {name for name in files if not list(ROOT.glob(name))} == set()
    tests = {named for line in lines for named in re.findall(r"(tests/[\w/]+\.py)::(\w+)", line)}
    assert {f"{file}::{name}" for file, name in tests if f"def {name}(" not in (ROOT / file).read_text()} == set()


def test_every_name_that_can_be_imported_is_there(page: Path) -> None:
    named = {
        found
        for line in code(page.read_text())
        for found in re.findall(r"\b(roundhouse(?:\.\w+)+):([A-Z]\w*|[a-z_]+)", line)
    }
    assert {f"{module}:{name}" for module, name in named if not hasattr(importlib.import_module(module), name)} == set()


def test_the_feature_map_has_all_rows_and_each_a_test_that_is_there_or_the_word_that_there_is_none() -> None:
    rows = re.findall(
        r"^\| (\d+) \| [^|]+ \| (works|in part|not yet) \| (.+) \|$", (ROOT / "docs/seed-map.md").read_text(), re.M
    )
    assert [int(number) for number, *_ in rows] == list(range(1, 105))
    for number, state, cells in rows:
        shown = re.findall(r"`(tests/[\w/]+\.py)`", cells)
        assert shown or state == "not yet" or "not yet" in cells, f"row {number} {state}, but names no test"
        assert all((ROOT / file).is_file() for file in shown), f"row {number}: {shown}"
        assert state != "works" or "`" in cells.split(" | ")[0] or "every" in cells, (
            f"row {number} names nothing that reaches it"
        )


def test_every_key_is_one_of_the_configuration(page: Path) -> None:
    top = "|".join(sorted({key.split(".")[0] for key in keys() if "." in key}))
    key = rf"^(?:--set )?((?:{top})(?:\.[a-z_]+)+)(?![*\w])"
    named = {name for line in code(page.read_text()) for name in re.findall(key, line)}
    assert {name for name in named - keys() if not name.endswith((".py", ".jsonl"))} == set()


def test_every_block_of_a_configuration_loads(page: Path) -> None:
    for block in blocks(page.read_text()):
        with contextlib.suppress(yaml.YAMLError):
            keys = yaml.safe_load(block.replace("…", "x"))
            if isinstance(keys, dict) and keys.keys() <= RunConfig.model_fields.keys():
                parse_config({"run_id": "mine", "store": "s3://bucket/store"} | keys, block)


def test_the_page_of_the_configuration_has_a_row_for_every_section() -> None:
    rows = set(re.findall(r"^\| `([a-z]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    assert {key.split(".")[0] for key in keys() if "." in key} == rows


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("roundhouse train FILE --dry-run    # resolved", []),
        ("roundhouse train FILE --dri-run", ["roundhouse train --dri-run"]),
        ("roundhouse runs show | wy", ["roundhouse runs wy"]),
        ("roundhouse store", ["roundhouse store"]),
        ("roundhouse tran FILE", ["roundhouse tran FILE"]),
    ],
)
def test_a_command_or_an_option_that_is_not_there_is_noticed(line: str, wrong: list[str]) -> None:
    assert list(wrong_commands(line)) == wrong


def test_a_version_that_a_page_forks_a_shipped_run_at_is_one_that_its_retention_keeps(page: Path) -> None:
    """README's own command failed after the quickstart: version 10 had been deleted."""
    for run, at in re.findall(r"roundhouse runs fork (\w+) --at (\d+)", page.read_text()):
        if (shipped := ROOT / f"configs/{run}.yaml").exists():
            kept = load_config(shipped).checkpoint.keep_every
            assert kept, f"{shipped}: checkpoint.keep_every is 0"
            assert int(at) % kept == 0


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "import pyarrow" in page.read_text()], ids=lambda page: page.stem
)
def test_a_snippet_that_reads_parquet_gives_the_rollouts_that_were_committed_and_nothing_else(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A glob over the stage's directory once gave 475 rows for 128 rollouts: turns and rollouts in one table."""
    [snippet] = (block for block in blocks(page.read_text()) if "import pyarrow" in block)
    store = str(tmp_path / ".roundhouse/store")
    write_run(store, "quickstart", first=10, iterations=10)
    night = TaskDraw.of_moment(datetime(2026, 11, 22, 2, tzinfo=UTC))
    write_dataset(write_run(store, "nights", first=25, iterations=25), "nightly", night, version=25)
    for directory in ("runs/quickstart/iterations/000010/collect", f"datasets/nightly/{night.label(25)}"):
        part = next((tmp_path / ".roundhouse/store" / directory).glob("rollouts-a0001-00000.parquet"))
        part.with_name("rollouts-a0002-00000.parquet").write_bytes(
            part.read_bytes()
        )  # of an attempt that was interrupted
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet, names)
    table = names["rollouts"].to_table()
    committed = 12 if page.stem == "concepts" else 8
    assert (table.num_rows, len(set(table["rollout_id"].to_pylist()))) == (committed, committed)
