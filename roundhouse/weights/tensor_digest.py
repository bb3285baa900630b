"""The digest of weights, tensor by tensor, whatever files they lie in.

Invariant: two sets of safetensors files have one digest exactly when they hold the same names with the same dtypes, shapes and
bytes (as far as SHA-256 tells). How the tensors are spread over files, and what metadata the files carry, does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from roundhouse.weights.ahead import in_order
from roundhouse.weights.tensor_file import Tensor, TensorFile

THREADS = 2


def tensor_digests(files: Iterable[Path | TensorFile], threads: int = THREADS) -> dict[str, str]:
    """`<dtype> <shape> <SHA-256 of the bytes>` of every tensor, by its name.

    Raises:
        DataError: a file is no safetensors file, or is cut short.
    """

    def tensors() -> Iterator[Tensor]:
        for file in files:
            yield from (file if isinstance(file, TensorFile) else TensorFile(file)).tensors()

    return dict(in_order(threads, _digest, tensors()))


def digest_of_tensors(digests: dict[str, str]) -> str:
    """One digest for all of them: `sha256:…`."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _digest(tensor: Tensor) -> tuple[str, str]:
    shape = "x".join(map(str, tensor.shape))
    return tensor.name, f"{tensor.dtype} {shape} {hashlib.sha256(memoryview(tensor.data)).hexdigest()}"  # type: ignore[arg-type]
