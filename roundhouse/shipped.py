"""Files that come with Roundhouse: `configs/`, `k8s/`, `images/` and `prefect.yaml`.

shipped("configs/quickstart.yaml")    # that of the working directory, else the one in the installed package

In a checkout `roundhouse/data` holds links to the folders at the top of the repository; in a wheel it holds the files.
A wheel does not contain the Makefile, so remedies name pip there (`remedy`).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped(path: str | Path) -> Path:
    """Return `path` if it exists or is absolute, else the file or folder of that name in the package.

    If neither exists, return `path`.
    """
    own = Path(path)
    if own.is_absolute() or own.exists():
        return own
    packaged = Path(str(files("roundhouse"))) / "data" / own
    return packaged if ".." not in own.parts and packaged.exists() else own


def remedy(make: str, installed: str, root: Path | None = None) -> str:
    """Return the command that mends an installation: of a checkout `make`, else that of an installed package.

    Args:
        root: of the checkout; by default the directory above the package.
    """
    top = Path(str(files("roundhouse"))).parent if root is None else root
    return make if (top / "Makefile").is_file() else installed
