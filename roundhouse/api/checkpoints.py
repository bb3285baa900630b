"""A policy version's checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundhouse.store.location import Location
from roundhouse.store.stage import Reference, model_location

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from roundhouse.store.run import Run


class Checkpoint:
    """The checkpoint of a policy version: a Hugging Face model, and the trainer's state."""

    def __init__(self, run: Run, store: str, reference: Reference) -> None:
        self._run = run
        self._store = store
        self.reference = reference

    @property
    def version(self) -> int:
        """The policy version."""
        return self.reference.policy_version

    @property
    def model_uri(self) -> str:
        """URI of the directory that transformers and vLLM load."""
        return model_uri(self.reference)

    def export(self, directory: str | os.PathLike[str], dtype: str | None = None, *, merge: bool = False) -> Path:
        """Write the model as a plain Hugging Face directory, with a model card that names its lineage.

        A run that trains an adapter (`train.lora`) exports the adapter, as PEFT loads it; with `merge` the whole model.

        Args:
            directory: that is to be made; an empty one may exist.
            dtype: float32, bfloat16 or float16; as stored without it.

        Raises:
            ConfigError: the directory holds files already, or an unknown dtype.
            StoreError: a file of the checkpoint is missing or damaged, or it keeps no adapter.
        """
        from roundhouse.api.export import export_model

        return export_model(self._run, self._store, self.reference, directory, dtype, merge=merge)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.version} of run {self._run.run_id}: {self.model_uri}>"


def model_uri(checkpoint: Reference) -> str:
    """Return the directory of a checkpoint's model; on this machine as a path."""
    return model_location(Location(checkpoint.uri)).uri.removeprefix("file://")
