"""The digest of weights, tensor by tensor, whatever files they lie in.

Invariant: two sets of safetensors files have one digest exactly when they hold the same names with the same dtypes, shapes and
bytes (as far as SHA-256 tells). How the tensors are spread over files, and what metadata the files carry, does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.weight_sync.ahead import in_order
from roundhouse.weight_sync.tensor_file import Tensor, TensorFile

if TYPE_CHECKING:
    import torch

THREADS = 2

_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""By torch's names."""


def tensor_digests(files: Iterable[Path | TensorFile], threads: int = THREADS) -> dict[str, str]:
    """`<dtype> <shape> <SHA-256 of the bytes>` of every tensor, by its name.

    Raises:
        DataError: a file is no safetensors file, or is cut short.
    """

    def tensors() -> Iterator[Tensor]:
        for file in files:
            yield from (file if isinstance(file, TensorFile) else TensorFile(file)).tensors()

    return dict(in_order(threads, _digest, tensors()))


def torch_digest(name: str, tensor: torch.Tensor) -> tuple[str, str]:
    """A tensor's name, and what `tensor_digests` would say of it in a file."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = _SAFETENSORS_NAMES[str(tensor.dtype).removeprefix("torch.")]
    return _digest(Tensor(name, dtype, tuple(tensor.shape), data))


def digest_of_tensors(digests: dict[str, str]) -> str:
    """One digest for all of them: `sha256:…`."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _digest(tensor: Tensor) -> tuple[str, str]:
    shape = "x".join(map(str, tensor.shape))
    return tensor.name, f"{tensor.dtype} {shape} {hashlib.sha256(memoryview(tensor.data)).hexdigest()}"  # type: ignore[arg-type]
