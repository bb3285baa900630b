"""Packages that fail as PyPI's torchvision, torchaudio and torchcodec, which are for CUDA, do with a torch for CPU."""

from pathlib import Path

SOURCES = {
    "torchvision": "import torchvision.extension\nraise RuntimeError('operator torchvision::nms does not exist')\n",
    "torchaudio": "raise OSError('Could not load this library: _torchaudio.so')\n",
    "torchcodec": "raise OSError('Could not load this library: libtorchcodec_image.so')\n",
}


def write_broken_extensions(directory: Path) -> None:
    """Write the packages into a directory of the import path."""
    for name, source in SOURCES.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(source)
        (directory / name / "extension.py").touch()
