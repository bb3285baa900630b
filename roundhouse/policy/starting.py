"""The kinds of `policy`: each makes version 0 of a run, and describes it before.

Invariant: `prompts` and `check` refuse only policies that `make` refuses, too. They only read, and download no weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roundhouse import plugins
from roundhouse.activity import announce
from roundhouse.config.models import RunConfig
from roundhouse.environments import demonstrating, refuse_without_demonstrations
from roundhouse.policy.model_directory import ChatTemplate
from roundhouse.policy.prompt_lengths import Prompts, Tokens, tokens_by
from roundhouse.policy.tokenizer import CHAT_TEMPLATE, PAD, TURN_END
from roundhouse.store.directories import policy_cache
from roundhouse.store.run import Run


class StartingPolicy(ABC):
    """One kind of starting policy, for a run's configuration."""

    remedy = ""
    """Remedy of an error of `check`."""
    memory_gib: float | None = None
    """Memory that a run of it takes on one machine; None: not known before the run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.section: Any = config.policy

    @abstractmethod
    def make(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        """Make the model directory of version 0.

        Args:
            work: an empty directory for it.

        Returns:
            The directory, which is `work` or lies in a cache, and details for the manifest.
        """

    @abstractmethod
    def write_untrained(self, run: Run, directory: Path) -> None:
        """Write the files that an engine needs of a policy that is still to be made: all but the weights."""

    def write_shape(self, directory: Path) -> bool:
        """Write config.json; return False if it does not exist before `make`."""
        return False

    def check(self) -> str | None:
        """Return a line about the files on this machine; None if there are none.

        Raises:
            ConfigError: they are missing, incomplete or damaged.
        """
        return None

    @abstractmethod
    def prompts(self, tools: list[dict[str, Any]], system: str | None, *, remote: bool) -> Prompts | None:
        """Return template and tokenizer; None if they cannot be read here, or if `rollout` limits no prompt.

        Args:
            tools: those of the first task.
            system: a system prompt that the template has to render.
            remote: read buckets, too.

        Raises:
            ConfigError: the policy cannot be made, or does not render the tools.
        """


def starting_policy_of(config: RunConfig) -> StartingPolicy:
    made: StartingPolicy = plugins.factory("policy", config.policy.kind)(config)
    return made


class WarmStart(StartingPolicy):
    """A small Qwen3 policy, trained on demonstrations of the environment."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.seed: int = config.seed if self.section.seed is None else self.section.seed

    def make(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        from roundhouse.policy.warm_start import make_starting_policy

        def on_progress(step: int, steps: int, loss: float) -> None:
            announce("warm_start", step=step, steps=steps, loss=loss)

        report = make_starting_policy(
            self.section,
            demonstrating(self.config.environment),
            self.seed,
            work,
            on_progress=on_progress,
            cache=policy_cache(self.config) / "warm-starts",
        )
        return work, {"warm_start": asdict(report)}

    def write_untrained(self, run: Run, directory: Path) -> None:
        self.write_shape(directory)

    def write_shape(self, directory: Path) -> bool:
        from roundhouse.policy.warm_start import write_engine_files

        write_engine_files(self.section, demonstrating(self.config.environment), self.seed, directory)
        return True

    def prompts(self, tools: list[dict[str, Any]], system: str | None, *, remote: bool) -> Prompts:
        refuse_without_demonstrations(self.config.environment)
        template = ChatTemplate("the warm start", CHAT_TEMPLATE, {"eos_token": TURN_END, "pad_token": PAD})
        return Prompts(self.config.rollout, template, self._tokens())

    def _tokens(self) -> Tokens:
        def read() -> bytes:
            from roundhouse.policy.warm_start import starting_tokenizer  # imports torch

            tokenizer = starting_tokenizer(self.section, demonstrating(self.config.environment), self.config.seed)
            return str(tokenizer.backend_tokenizer.to_str()).encode()

        return tokens_by(read)
