"""Where `roundhouse gym collect` gets its rollouts from: which of its options name a source, and the source they name.

Invariant: exactly one source is named; the agent that rows without one get is known before a row is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.compat.nemo_gym.exchange.json_lines import Row
    from roundhouse.compat.nemo_gym.exchange.stream import RolloutSource


@dataclass(frozen=True)
class SourceOptions:
    """The options that say where rollouts come from."""

    head: str | None = None
    agent_url: str | None = None
    config: list[Path] | None = None
    environment: str | None = None
    parameters: str = "{}"
    engine_url: str | None = None
    agent: str | None = None
    timeout: float = 3600.0
    concurrency: int = 64
    max_turns: int = 16
    max_tokens: int = 32_768
    max_output_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class OpenSource:
    """A source, the agent for rows that name none, and task rows where no file is given."""

    source: RolloutSource
    agent: str | None
    tasks: Sequence[Row] = ()


def open_source(options: SourceOptions) -> OpenSource:
    """
    Raises:
        ConfigError: none or several places are named, or an option is missing beside one, or would do nothing.
    """
    named = [
        option
        for option, value in (
            ("--head", options.head),
            ("--agent-url", options.agent_url),
            ("--config", options.config),
            ("--environment", options.environment),
        )
        if value
    ]
    if len(named) != 1:
        raise ConfigError(
            f"Name one source of rollouts, out of --head, --agent-url, --config and --environment; "
            f"named: {', '.join(named) or 'none'}."
        )
    if options.environment:
        if options.agent is not None:
            raise ConfigError("--agent: an environment that runs here is the agent of its rows; give one or the other.")
        return _own(options)
    usual = SourceOptions()
    for option in ("parameters", "engine_url", "max_turns", "max_tokens", "seed"):
        if getattr(options, option) != getattr(usual, option):
            raise ConfigError(
                f"--{option.replace('_', '-')} is for --environment. With {named[0]} the agent server decides it: by its own "
                "configuration, or by +responses_create_params.… in the rows."
            )
    return _agents(options)


def _agents(options: SourceOptions) -> OpenSource:
    import asyncio

    from roundhouse.compat.nemo_gym.exchange.agent_servers import EVERY, AgentServers, agents_of_head

    if options.agent_url:
        return OpenSource(AgentServers({EVERY: options.agent_url}, options.timeout), options.agent or "agent")
    head = options.head or _head_of(options.config or [])
    urls = asyncio.run(agents_of_head(head))
    if options.agent is not None and options.agent not in urls:
        raise ConfigError(f"--agent is {options.agent}; the head server at {head} knows {', '.join(sorted(urls))}.")
    only = next(iter(urls)) if len(urls) == 1 else None
    return OpenSource(AgentServers(urls, options.timeout, key="--head"), options.agent or only)


def _head_of(paths: list[Path]) -> str:
    """The head server of a configuration that was started: it knows the ports that were chosen."""
    from roundhouse.compat.nemo_gym.config.resolve import resolve

    resolution = resolve([str(path) for path in paths], choose_ports=False)
    resolution.raise_problems()
    host, port = resolution.head_address()
    return f"http://{host}:{port}"


def _own(options: SourceOptions) -> OpenSource:
    from roundhouse.compat.nemo_gym.exchange.own_policy import OwnPolicy
    from roundhouse.config.models import GenerationConfig, RolloutConfig, Sampling
    from roundhouse.environments.naming import environment_config

    if options.engine_url is None:
        raise ConfigError("--environment needs --engine-url: the base URL of a running policy.")
    new_tokens = options.max_output_tokens or options.max_tokens
    generation = GenerationConfig(
        sampling=Sampling(max_new_tokens=new_tokens),
        request_timeout_seconds=options.timeout,
        max_model_len=options.max_tokens,
    )
    rollout = RolloutConfig(
        max_turns=options.max_turns,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency or None,
        timeout_seconds=options.timeout,
        tool_timeout_seconds=options.timeout,
    )
    environment = environment_config(options.environment or "", options.parameters)
    source = OwnPolicy(options.engine_url, environment, generation, rollout, options.seed)
    return OpenSource(source, source.agent, source.tasks("train"))
