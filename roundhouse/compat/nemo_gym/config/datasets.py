"""The `datasets` entries of an agent.

Invariant: an entry that loads names a file and a type, and, where it is trained or validated on, a licence. Unknown fields
are kept: other tools put theirs there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

License = Literal[
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
]
"""The licences that NeMo Gym accepts."""

_Repeats = Annotated[int, Field(ge=1)]


class _DatasetEntry(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)


class GitlabArtifact(_DatasetEntry):
    """A file of GitLab's model registry."""

    dataset_name: str
    version: str
    artifact_fpath: str


class GitlabSource(GitlabArtifact):
    """The same, as a `source`."""

    type: Literal["gitlab"]


class HuggingFaceArtifact(_DatasetEntry):
    """A dataset of the Hugging Face hub, or one file of it."""

    repo_id: str
    artifact_fpath: str | None = None


class HuggingFaceSource(HuggingFaceArtifact):
    """The same, as a `source`."""

    type: Literal["huggingface"]


class Dataset(_DatasetEntry):
    """Rows to train, validate or try on."""

    name: str
    type: Literal["train", "validation", "example"]
    jsonl_fpath: str
    """JSON lines file of task rows, relative to a search root."""
    num_repeats: _Repeats = 1
    source: Annotated[GitlabSource | HuggingFaceSource, Field(discriminator="type")] | None = None
    """Where to fetch the file when it is not there."""
    gitlab_identifier: GitlabArtifact | None = None
    """The older form of a gitlab source."""
    huggingface_identifier: HuggingFaceArtifact | None = None
    """The older form of a huggingface source."""
    license: License | None = None

    @model_validator(mode="after")
    def _complete(self) -> Dataset:
        if self.type != "example" and self.license is None:
            raise ValueError(f"the {self.type} dataset {self.name!r} needs a license")
        if self.source is not None and (self.gitlab_identifier or self.huggingface_identifier):
            raise ValueError(f"the dataset {self.name!r} names its source twice: keep `source`, drop the *_identifier")
        return self


class BenchmarkDataset(_DatasetEntry):
    """Rows that a script prepares."""

    name: str
    type: Literal["benchmark"]
    jsonl_fpath: str
    prepare_script: str
    prompt_config: str | None = None
    num_repeats: _Repeats = 1


DatasetEntry = Annotated[Dataset | BenchmarkDataset, Field(discriminator="type")]
