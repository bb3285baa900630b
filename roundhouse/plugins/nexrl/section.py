"""The section of rollouts played by a worker class."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roundhouse.config.environments import EnvironmentSection, has_rows
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import Code, Consent, DataFile, Operational


class WorkerEnvironment(EnvironmentSection):
    """Rollouts played by a worker class (custom or built-in) over the items of a data file."""

    has_own_loop: ClassVar[bool] = True
    own_limits: ClassVar[tuple[str, ...]] = ("system_prompt", "parallel_tool_calls")
    plays_given_rows: ClassVar[bool] = False
    kind: Literal["worker"]
    worker: Annotated[str, Consent("code", frozenset(("simple", "agent", "nexau", "mock")))] = "simple"
    """`simple` (one completion), `agent` (several turns), `nexau` (an agent's file of NexAU), `mock` (no policy), or a class:
    `path/to/file.py:Class` or `package.module:Class`."""
    evaluator: Code[str | None] = None
    """Evaluator class, named in the same way; unset: the worker's own."""
    workspace: Code[str | None] = None
    """First directory for relative paths of classes, before NEXRL_PATH and the working directory. Its files can import each
    other. `${CONFIG_DIR}` is the directory of the configuration file."""
    train_data: DataFile[str]
    """Items for training: a .parquet, .csv or .jsonl file, or a source that `data_loader` reads."""
    heldout_data: DataFile[str | None] = None
    """Items for evaluation."""
    data_loader: Annotated[str, Consent("code", frozenset(("file", "torch", "mock")))] = "file"
    """Reader of the items. `file`: one file or several, separated by commas (NexRL's name is `torch`). `mock`: invented items;
    the file is their number. Or a `BaseDataLoader`, named like a worker: it is created with the file and `is_validate`, and
    returns the tasks in its order. `epochs`, `shuffle`, `drop_last` and `max_prompt_tokens` of `rollout` decide how a run
    draws them."""
    max_retries: Operational[Annotated[int, Field(ge=0)]] = 0
    """Number of retries of a failed model call, with the pauses of `rollout.retry`. Then the rollout fails and is retried from
    its start."""
    parameters: Annotated[
        Parameters,
        Consent("parameters", code_keys=("nexau_agent_config_path", "nexau_agent_workspace", "evaluator_module_path")),
    ] = Field(default_factory=dict)
    """Further keyword arguments of the worker's class. Name a secret by its place: `api_key: {variable: JUDGE_KEY}` or `{file:
    …}`."""

    def elsewhere(self) -> str:
        return (
            f"environment.kind is worker ({self.worker}): this class plays the rollouts. It has no demonstrations and cannot "
            "be served. Set policy.kind to pretrained."
        )

    def has_heldout(self, read: bool) -> bool | None:
        return has_rows(self.train_data, self.heldout_data, read)
