"""`roundhouse gym collect | reverify | profile | collate | demonstrations`: NeMo Gym's files.

Invariant of a source of `collect`: exactly one is named; the agent that rows without one get is known before a row is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import (
    console,
    error_console,
    out,
    written,
)
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.plugins.nemo_gym.exchange.collection import Summary
    from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles, Row
    from roundhouse.plugins.nemo_gym.exchange.stream import Remaining, RolloutSource
    from roundhouse.plugins.nemo_gym.exchange.task_rows import Materialization

app = typer.Typer()


@app.command()
def collect(
    output: Annotated[Path, typer.Option("--output", "-o", help="Rollouts file to write (JSON lines).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="+responses_create_params.x=…, +num_repeats_add_seed=true", show_default=False),
    ] = None,
    inputs: Annotated[str | None, typer.Option("--input", "-i", help="Task rows (JSON lines).")] = None,
    head: Annotated[str | None, typer.Option(help="Base URL of a head server that knows the agents.")] = None,
    agent_url: Annotated[str | None, typer.Option(help="Base URL of one agent server for all rows.")] = None,
    config: Annotated[list[Path] | None, typer.Option(help="NeMo Gym configuration that has been started.")] = None,
    environment: Annotated[str | None, typer.Option(help="Environment to run here: a kind, or module:Class.")] = None,
    parameters: Annotated[str, typer.Option(help="The environment's parameters (JSON).")] = "{}",
    engine_url: Annotated[str | None, typer.Option(help="Base URL of a running policy, with --environment.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", "-a", help="Agent for rows that name none.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to take.", min=1)] = None,
    num_repeats: Annotated[str, typer.Option(help="Rollouts a row: 4, or {agent: 4, _default: 1}.")] = "1",
    concurrency: Annotated[int, typer.Option(help="Rollouts in flight; 0: all at once.", min=0)] = 64,
    resume: Annotated[
        bool, typer.Option("--resume", help="Collect what the output lacks; its rows are those of before.")
    ] = False,
    prompt_config: Annotated[str | None, typer.Option(help="Prompt templates (YAML) that make the input.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    disable_aggregation: Annotated[bool, typer.Option("--disable-aggregation", help="No aggregate metrics.")] = False,
    max_turns: Annotated[int, typer.Option(help="Model calls a rollout, with --environment.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens a rollout, with --environment.", min=1)] = 32_768,
    timeout: Annotated[float, typer.Option(help="Seconds for one rollout.", min=0.001)] = 3600.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling, with --environment.")] = 0,
    require_complete: Annotated[
        bool, typer.Option("--require-complete", help="Exit code 1 unless every rollout has a result.")
    ] = False,
) -> None:
    """Collect rollouts of task rows from agent servers, or from a running policy and an environment."""
    from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles

    opened = open_source(
        SourceOptions(
            head, agent_url, config, environment, parameters, engine_url, agent, timeout, concurrency, max_turns, max_tokens,
            max_output_tokens, seed,
        )
    )  # fmt: skip
    sampling = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    sampling_options = {name: value for name, value in sampling.items() if value is not None}
    how = materialization(opened.agent, limit, num_repeats, prompt_config, sampling_options, overrides or [])
    how = replace(how, agents=opened.agents)
    files = CollectionFiles(output)
    summary = _collect(
        files, _left(files, inputs, opened, how, resume), opened, concurrency or None, not disable_aggregation
    )
    _report(summary, require_complete=require_complete)


def _report(summary: Summary, *, require_complete: bool = False) -> None:
    """Print the results of a collection; end with exit code 1 if it is empty, or incomplete against
    `require_complete`."""
    terminal = console()
    lines = [summary.line(), *summary.failure_lines()]
    if summary.not_run:
        lines.append(f"{summary.outage} Run the command again with --resume.")
    for line in lines:
        terminal.print(line, highlight=False, markup=False, soft_wrap=True)
    out(f"{summary.files.rollouts}")
    if (verdict := summary.verdict(require_complete=require_complete)) is not None:
        error_console().print(verdict, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)


@app.command()
def reverify(
    rollouts: Annotated[Path, typer.Option(help="Rollouts file to judge again.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Rollouts file to write.")],
    inputs: Annotated[
        Path | None, typer.Option(help="Materialized inputs, if not in the folder of the rollouts.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="Base URL of a head server that knows the resources servers.")
    ] = None,
    resources_url: Annotated[str | None, typer.Option(help="Base URL of one resources server for all rows.")] = None,
    judge_failed_only: Annotated[
        bool, typer.Option("--judge-failed-only", help="Keep existing verdicts and judge the rows without one.")
    ] = False,
    append: Annotated[bool, typer.Option("--append", help="Add recovered rows to an output that is there.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is there.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume: run the rows that the output lacks.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Judge by servers that are not stateless, into unsafe_….")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Rollouts to judge.", min=1)] = None,
    concurrency: Annotated[int, typer.Option(help="Rollouts in flight; 0: all at once.", min=0)] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one verdict.", min=0.001)] = 600.0,
    disable_aggregation: Annotated[bool, typer.Option("--disable-aggregation", help="No aggregate metrics.")] = False,
) -> None:
    """Judge stored rollouts anew, by the verifiers that run now; the policy is not asked."""
    import asyncio

    from roundhouse.plugins.nemo_gym.exchange.collection import collect as collect_rows
    from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles
    from roundhouse.plugins.nemo_gym.exchange.reverify import Reverification, Verifiers, begin, verifiers_of_head
    from roundhouse.plugins.nemo_gym.exchange.stream import EVERY

    if (head is None) == (resources_url is None):
        raise ConfigError("Name one place of the verifiers: --head or --resources-url.")
    files = CollectionFiles(rollouts)
    request = Reverification(
        inputs or files.materialized_inputs, files, output, limit, judge_failed_only, append, overwrite, resume, force
    )

    async def work() -> Summary:
        if resources_url is not None:
            verifiers = Verifiers({EVERY: resources_url}, timeout, key="--resources-url")
        else:
            verifiers = await verifiers_of_head(head or "", timeout)
        async with verifiers:
            written, left = await begin(request, verifiers)
            return await collect_rows(
                written, left, verifiers, concurrency=concurrency or None, aggregate=not disable_aggregation
            )

    _report(asyncio.run(work()))


@app.command()
def profile(
    rollouts: Annotated[Path, typer.Option(help="Rollouts file; its materialized inputs are in the same folder.")],
    inputs: Annotated[Path | None, typer.Option(help="Materialized inputs, if they lie elsewhere.")] = None,
    allow_partial: Annotated[bool, typer.Option("--allow-partial", help="Profile incomplete results, too.")] = False,
) -> None:
    """Write statistics of each task's rollouts, each agent's and each repeat's, as files next to the rollouts."""
    from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles
    from roundhouse.plugins.nemo_gym.exchange.statistics import write_profile

    files = CollectionFiles(rollouts)
    statistics = write_profile(files, inputs or files.materialized_inputs, allow_partial=allow_partial)
    out(f"{statistics.completed} of {statistics.expected} rollouts, {len(statistics.tasks)} tasks")
    for metrics in statistics.agents:
        masked = metrics.get("coverage/masked_rollouts", 0)
        note = f", without {masked} masked rollouts" if masked else ""
        out(f"{metrics['agent_ref']['name']}: mean reward {metrics.get('mean/reward', float('nan')):.3f}{note}")
    out(f"{files.reward_profile}\n{files.agent_metrics}\n{files.repeat_metrics}")


@app.command()
def collate(
    config: Annotated[list[Path], typer.Argument(help="NeMo Gym configuration; its agents name the datasets.")],
    output_dir: Annotated[Path, typer.Option(help="Directory of the collated files.")],
    mode: Annotated[str, typer.Option(help="train_preparation or example_validation")] = "train_preparation",
    search_dir: Annotated[list[Path] | None, typer.Option(help="Where data files are looked for.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace metrics that differ.")] = False,
) -> None:
    """Collate the datasets of a configuration into train.jsonl, validation.jsonl, … with their metrics."""
    from roundhouse.plugins.nemo_gym.config.resolve import resolve
    from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
    from roundhouse.plugins.nemo_gym.exchange.task_rows import TYPES, AgentDataset
    from roundhouse.plugins.nemo_gym.exchange.task_rows import collate as collate_datasets

    if mode not in TYPES:
        raise ConfigError(f"--mode is {mode}; it is one of {', '.join(TYPES)}.")
    roots = SearchRoots.of(search_dir or [])
    resolution = resolve([str(path) for path in config], roots=roots, choose_ports=False)
    if not resolution.instances:
        resolution.raise_problems()
    datasets = [
        AgentDataset(instance.name, entry)
        for instance in resolution.instances
        if instance.type == "responses_api_agents"
        for entry in instance.fields.datasets or ()
    ]
    with written("--output-dir", output_dir):
        for file in collate_datasets(datasets, output_dir, roots, mode=mode, overwrite=overwrite):
            out(f"{file.rows:>8} rows  {file.path}  {file.metrics_path.name}")


@app.command()
def demonstrations(
    environment: Annotated[str, typer.Argument(help="An environment's kind, or module:Class.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of chat rows to write (JSON lines).")],
    count: Annotated[int, typer.Option(help="Conversations.", min=1)] = 256,
    good_fraction: Annotated[float, typer.Option(help="Share of them that are right.", min=0, max=1)] = 1.0,
    parameters: Annotated[str, typer.Option(help="The environment's parameters (JSON).")] = "{}",
    seed: Annotated[int, typer.Option(help="Which conversations.")] = 0,
) -> None:
    """Write an environment's own demonstrations as chat rows, of its training tasks only."""
    import json

    from roundhouse.environments import environment_config, load_any
    from roundhouse.rollout.responses import chat_tools

    loaded = load_any(environment_config(environment, parameters))
    try:
        conversations = loaded.demonstrations("train", count, good_fraction, seed)
    except NotImplementedError as error:
        raise ConfigError(
            f"The environment {environment} has no demonstrations. Add the method `demonstrations` to its class, or write rows."
        ) from error
    tools = chat_tools(loaded.tool_schemas())
    rows = [
        json.dumps({"messages": messages, "tools": tools} if tools else {"messages": messages})
        for messages in conversations
    ]
    with written("--output", output):
        output.write_text("\n".join(rows) + "\n", encoding="utf-8")
    out(f"{len(rows)} conversations\n{output}")


@app.command("import", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def refuse_import() -> None:
    """Refuse the former command with its present name."""
    raise ConfigError("`roundhouse gym import` is now `roundhouse import`.")


def materialization(
    agent: str | None,
    limit: int | None,
    repeats: str,
    prompt: str | None,
    sampling: dict[str, Any],
    overrides: list[str],
) -> Materialization:
    """Return the options of `collect` about its rows.

    Raises:
        ConfigError: an override is malformed, or concerns another section.
    """
    from roundhouse.plugins.nemo_gym.config.sources import parse_override
    from roundhouse.plugins.nemo_gym.exchange.task_rows import COLLECTION_KEYS, Materialization, Repeats, read_prompt

    params: dict[str, Any] = {}
    add_seed = False
    refused: list[str] = []
    for one in map(parse_override, overrides):
        match one.path:
            case ("responses_create_params", name) if one.has_value:
                params[name] = one.value
            case ("num_repeats_add_seed",) if isinstance(one.value, bool):
                add_seed = one.value
            case (name, *_) if name in COLLECTION_KEYS:
                refused.append(f"The override {one.text!r} is {COLLECTION_KEYS[name]}.")
            case _:
                refused.append(
                    f"The override {one.text!r} is about nothing of a collection: "
                    "+responses_create_params.<name>=<value> and +num_repeats_add_seed=true are."
                )
    if refused:
        raise ConfigError("\n".join(refused))
    return Materialization(
        agent=agent,
        limit=limit,
        repeats=Repeats.of(parse_override(f"+num_repeats={repeats}").value),
        add_seed=add_seed,
        params=params | sampling,
        prompt=None if prompt is None else read_prompt(prompt),
    )


def _left(
    files: CollectionFiles, inputs: str | None, opened: OpenSource, how: Materialization, resume: bool
) -> Remaining:
    """Return the rows to run: the rest of an earlier collection, or all rows of the file or the environment."""
    from roundhouse.plugins.nemo_gym.exchange import collection
    from roundhouse.plugins.nemo_gym.exchange.json_lines import line_of, refuse_own
    from roundhouse.plugins.nemo_gym.exchange.task_rows import expanded, materialize

    if resume and files.materialized_inputs.exists():
        return collection.resume(files)
    if inputs is not None:
        written = (files.materialized_inputs, files.rollouts, files.failures, files.aggregate_metrics)
        refuse_own("--input", Path(inputs.removeprefix("file://")), files.rollouts, written)
        return collection.begin(files, materialize(inputs, how))
    if not opened.tasks:
        raise ConfigError("--input is missing: the task rows to collect rollouts of.")
    lines = ((number, line_of(row)) for number, row in enumerate(opened.tasks[: how.limit], 1))
    return collection.begin(files, expanded(lines, how, "the environment's tasks"))


def _collect(
    files: CollectionFiles, left: Remaining, opened: OpenSource, concurrency: int | None, aggregate: bool
) -> Summary:
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from roundhouse.plugins.nemo_gym.exchange.collection import collect as collect_rows

    terminal = console()
    columns = (TextColumn("rollouts"), BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(left.rows))

        def show(summary: Summary) -> None:
            bar.update(task, completed=summary.completed + summary.failed + summary.not_run, description=summary.line())

        async def work() -> Summary:
            async with opened.source:
                return await collect_rows(
                    files, left, opened.source, concurrency=concurrency, aggregate=aggregate, on_outcome=show
                )

        return asyncio.run(work())


@dataclass(frozen=True)
class SourceOptions:
    """Options that select the source of rollouts."""

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
    """A source, the agent for rows that name none, and task rows if no file is given."""

    source: RolloutSource
    agent: str | None
    tasks: Sequence[Row] = ()
    agents: frozenset[str] | None = None
    """The agents that it has; None: any that a row names."""


def open_source(options: SourceOptions) -> OpenSource:
    """Open the source of these options.

    Raises:
        ConfigError: no or several sources are named, or a required option is missing, or an option would be ignored.
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
    import asyncio

    from roundhouse.plugins.nemo_gym.exchange.stream import EVERY, AgentServers, agents_of_head

    if options.agent_url:
        return OpenSource(AgentServers({EVERY: options.agent_url}, options.timeout), options.agent or "agent")
    head = options.head
    if not head:  # that of a configuration that was started: it knows the ports that were chosen
        from roundhouse.plugins.nemo_gym.config.resolve import resolve

        resolution = resolve([str(path) for path in options.config or []], choose_ports=False)
        resolution.raise_problems()
        host, port = resolution.head_address()
        head = f"http://{host}:{port}"
    urls = asyncio.run(agents_of_head(head))
    if options.agent is not None and options.agent not in urls:
        raise ConfigError(f"--agent is {options.agent}; the head server at {head} knows {', '.join(sorted(urls))}.")
    only = next(iter(urls)) if len(urls) == 1 else None
    return OpenSource(AgentServers(urls, options.timeout, key="--head"), options.agent or only, agents=frozenset(urls))


def _own(options: SourceOptions) -> OpenSource:
    from roundhouse.config.models import GenerationConfig, RolloutConfig, Sampling
    from roundhouse.config.rollout import LARGEST_REWARD
    from roundhouse.environments import environment_config
    from roundhouse.plugins.nemo_gym.exchange.stream import OwnPolicy

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
        reward_limit=LARGEST_REWARD,
    )
    environment = environment_config(options.environment or "", options.parameters)
    source = OwnPolicy(options.engine_url, environment, generation, rollout, options.seed)
    return OpenSource(source, source.agent, source.tasks("train"))
