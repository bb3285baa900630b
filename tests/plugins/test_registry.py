"""A foreign package adds kinds to a run; a broken one disturbs only the runs that name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse import plugins
from roundhouse.cli import app
from roundhouse.config.consent import unnamed_code
from roundhouse.config.defaults import OWN, default_rates
from roundhouse.config.kinds import Kinds, kind_of
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.placement import placement
from roundhouse.config.reference import page
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError
from roundhouse.generation.deployment import engine_arguments
from roundhouse.generation.serve_app import make_engine
from roundhouse.infra.services import needed_services
from roundhouse.policy.starting import starting_policy_of
from roundhouse.rollout.clients import open_environment, verdict_on
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.report import sink_class
from roundhouse.stages.task_survey import has_local_rows
from roundhouse.stages.trainers import open_service
from roundhouse.training.algorithms import build_algorithm
from roundhouse.training.loss import loss_function
from tests.plugins.packages import MAZE, install

NAMES = {"environment.maze": "rh_maze:MAZE", "sink.log": "rh_maze:LOG"}
RUN: dict[str, Any] = {
    "run_id": "r",
    "environment": {"kind": "maze", "width": 5},
    "tracking": {"sinks": ["log"]},
    "evaluation": {"tasks": 1},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the search path, with the package rh-maze."""
    site = tmp_path / "site"
    install(site, "rh-maze", NAMES, {"rh_maze": MAZE})
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.usefixtures("site")
def test_an_installed_package_adds_an_environment_and_a_sink() -> None:
    config = parse_config(RUN)
    environment: Any = load_any(config.environment)
    assert (type(environment).__name__, environment.width) == ("Maze", 5)
    assert [row["task_id"] for row in open_environment(config.environment).tasks("train")] == ["a", "b"]
    assert sink_class("log").__name__ == "LogSink"
    assert unnamed_code(config, []) == {}, "a person installed the code"
    assert json.loads(config.model_dump_json())["environment"]["width"] == 5
    assert parse_config(config.model_dump(mode="json")) == config
    mixture = {"kind": "mixture", "environments": {"m": {"kind": "maze"}, "s": {"kind": "sort"}}}
    assert parse_config(RUN | {"environment": mixture}).environment.kind == "mixture"


@pytest.mark.real
async def test_a_process_of_its_own_plays_the_environment_of_a_package(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    client: Any = open_environment(parse_config(RUN).environment)
    async with client:
        row = client.tasks("train")[0]
        assert [(await verdict_on(client, row, text)).reward for text in ("north", "south")] == [1.0, 0.0]


@pytest.mark.usefixtures("site")
def test_the_schema_and_the_reference_page_show_the_kinds_of_packages() -> None:
    assert "MazeSection" in RunConfig.model_json_schema()["$defs"]
    assert "environment (maze)" in page()
    assert "Cells of a side." in page()


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"kind": "maze", "wdth": 5}, "environment.wdth: unknown key. Did you mean 'width'?"),
        ({"kind": "maze", "width": "x"}, "environment.width: Input should be a valid integer"),
        ({"kind": "maz"}, "environment.kind: 'maz' is unknown. Did you mean 'maze'?"),
        ({"width": 3}, "environment"),
    ],
)
def test_a_wrong_key_of_a_plugin_is_named_as_of_a_built_in_kind(environment: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(RUN | {"environment": environment})
    assert text in str(error.value)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(("width", "code", "text"), [(5, 0, "kind: maze"), (12, 78, "mazes end at 9. Lower it.")])
def test_a_dry_run_uses_and_checks_the_environment_of_a_package(
    width: int, code: int, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    tree = RUN | {"environment": {"kind": "maze", "width": width}, "store": str(tmp_path / "store")}
    file.write_text(yaml.safe_dump(tree))
    shown = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert (78 if isinstance(shown.exception, ConfigError) else shown.exit_code) == code
    assert text in shown.output + str(shown.exception)


def test_a_broken_package_is_named_with_a_remedy_by_runs_that_use_it(site: Path) -> None:
    install(site, "rh-broken", {"environment.hole": "rh_broken:HOLE"}, {"rh_broken": "import no_such_package\n"}, "0.3")
    assert parse_config({"run_id": "r"}).environment.kind == "calculator"
    with pytest.raises(ConfigError) as error:
        parse_config({"run_id": "r", "environment": {"kind": "hole"}})
    assert "environment.hole is declared by rh-broken 0.3, which cannot be imported" in str(error.value)
    assert "no_such_package" in str(error.value)
    assert "pip uninstall rh-broken" in str(error.value)
    assert "environment (maze)" in page()


def test_a_name_that_two_packages_declare_is_refused_with_both(site: Path) -> None:
    install(site, "rh-other", {"environment.maze": "rh_maze:MAZE"}, {}, "2.0")
    with pytest.raises(ConfigError, match=r"declared by rh-(maze 1.0 and rh-other 2.0|other 2.0 and rh-maze 1.0)"):
        parse_config(RUN)


def test_a_built_in_name_that_a_package_declares_is_refused_with_the_package(site: Path) -> None:
    install(site, "rh-other", {"environment.sort": "rh_maze:MAZE", "sink.mlflow": "rh_maze:LOG"}, {}, "2.0")
    text = r"environment.sort is built in, and declared by rh-other 2.0. Rename it there. .*pip uninstall rh-other"
    with pytest.raises(ConfigError, match=text):
        parse_config({"run_id": "r", "environment": {"kind": "sort"}})
    with pytest.raises(ConfigError, match=r"sink\.mlflow is built in"):
        plugins.factory("sink", "mlflow")
    assert parse_config({"run_id": "r", "environment": {"kind": "countdown"}}).environment.kind == "countdown"
    problems = [problem for declared, problem in plugins.declarations() if declared.package == "rh-other 2.0"]
    assert [problem.partition(",")[0] for problem in problems] == [
        "environment.sort is built in",
        "sink.mlflow is built in",
    ]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"environment.x": "rh_odd:NUMBER"}, "is a int, not a roundhouse.plugins.Plugin"),
        ({"environment.x": "rh_odd:KINDLESS"}, "has no key `kind: Literal['x']`"),
        ({"judgement.x": "rh_odd:KINDLESS"}, "unknown role 'judgement'"),
    ],
)
def test_a_wrong_declaration_is_listed_with_its_problem(names: dict[str, str], problem: str, site: Path) -> None:
    source = "from roundhouse.plugins import Plugin\nNUMBER = 1\nKINDLESS = Plugin('json:dumps', 'json:JSONEncoder')\n"
    install(site, "rh-odd", names, {"rh_odd": source})
    assert any(problem in each for _, each in plugins.declarations())


SERVICE = """
from typing import ClassVar, Literal
from roundhouse.config.training import ServiceSection
from roundhouse.plugins import Plugin

class LentService(ServiceSection):
    kind: Literal["lent"]
    is_elsewhere: ClassVar[bool] = True
    hours: int = 1

    @property
    def place(self):
        return f"a machine lent for {self.hours} hours"

    def check_run(self, config):
        if config.train.lora is not None:
            raise ValueError("train.service.kind is lent, but train.lora is set. Leave it out.")

def open_lent(config, opening):
    return (config.service.hours, opening.owner, opening.temperature)

LENT = Plugin(open_lent, LentService)
"""


def test_a_package_adds_a_train_service_with_its_checks_and_its_place(site: Path) -> None:
    install(site, "rh-lent", {"train_service.lent": "rh_lent:LENT"}, {"rh_lent": SERVICE})
    config = parse_config({"run_id": "r", "train": {"service": {"kind": "lent", "hours": 3}}})
    service: Any = open_service(config.train, owner="u", temperature=0.5)
    assert service == (3, "u", 0.5)
    [trainer] = [each for each in placement(config) if each.role == "trainer"]
    assert trainer.where == "a machine lent for 3 hours"
    assert parse_config(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match=r"train\.service\.kind is lent, but train\.lora is set"):
        parse_config({"run_id": "r", "train": {"service": {"kind": "lent"}, "lora": {}}})


def test_a_package_adds_a_starting_policy(site: Path, tmp_path: Path) -> None:
    source = """
    from typing import Literal
    from roundhouse.config.training import PolicySection
    from roundhouse.plugins import Plugin
    from roundhouse.policy.starting import StartingPolicy
    class BlankSection(PolicySection):
        kind: Literal["blank"]
        layers: int = 1
    class Blank(StartingPolicy):
        def make(self, run, work):
            self.write_untrained(run, work)
            return work, {"layers": self.section.layers}
        def write_untrained(self, run, directory):
            (directory / "config.json").write_text("{}")
        def prompts(self, tools, system, *, remote):
            return None
    BLANK = Plugin(Blank, BlankSection)
    """
    install(site, "rh-blank", {"policy.blank": "rh_blank:BLANK"}, {"rh_blank": source})
    config = parse_config({"run_id": "r", "policy": {"kind": "blank", "layers": 3}})
    run: Any = None
    assert starting_policy_of(config).make(run, tmp_path) == (tmp_path, {"layers": 3})
    assert (default_rates(config), config.policy.model) == (OWN, None)
    refuse_unready(config, remote=False)
    with pytest.raises(ConfigError, match=r"policy\.layrs: unknown key. Did you mean .layers"):
        parse_config({"run_id": "r", "policy": {"kind": "blank", "layrs": 3}})


def test_a_package_adds_a_loss_with_its_traits(site: Path) -> None:
    source = """
    from roundhouse.config.algorithms import LossTraits
    from roundhouse.plugins import Plugin
    def plain_loss(tokens, ratio, settings):
        return -tokens.advantages * ratio
    PLAIN = Plugin(plain_loss, traits=LossTraits(single_update_only=True, takes_ratio=False))
    """
    install(site, "rh-plain", {"loss.plain": "rh_plain:PLAIN"}, {"rh_plain": source})
    once = {"minibatches": 1, "epochs": 1}
    config = parse_config({"run_id": "r", "train": {"algorithm": {"policy_loss": "plain"}, **once}})
    assert loss_function("plain").__name__ == "plain_loss"
    assert build_algorithm(config.train.algorithm).loss.policy_loss == "plain"
    assert unnamed_code(config, []) == {}, "a person installed the code"
    for train, text in (
        (
            {"algorithm": {"policy_loss": "plain"}, "minibatches": 4},
            "policy_loss: plain, which needs one optimizer step",
        ),
        (
            {"algorithm": {"policy_loss": "plain", "importance_ratio": "on_policy"}, **once},
            "has no effect with policy_loss",
        ),
        (
            {"algorithm": {"policy_loss": "plian"}},
            "unknown policy loss 'plian'. Set it to clipped, cispo, reinforce, pl",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            parse_config({"run_id": "r", "train": train})
        assert text in str(error.value)


def test_a_package_adds_a_weight_transport_with_its_check_and_its_traits(site: Path) -> None:
    source = """
    from roundhouse.config.generation import TransportTraits
    from roundhouse.plugins import Plugin
    from roundhouse.weight_sync.base import CheckpointTransport

    class Mirror(CheckpointTransport):
        def check(self, run):
            if run.generation.dtype == "float16":
                raise ValueError(f"generation.weight_sync is {self.kind}, but generation.dtype is float16.")

    MIRROR, PLAIN = Plugin(Mirror, traits=TransportTraits(sends_checkpoint=True)), Plugin(Mirror)
    """
    names = {"weight_transport.mirror": "rh_mirror:MIRROR", "weight_transport.plain": "rh_mirror:PLAIN"}
    install(site, "rh-mirror", names, {"rh_mirror": source})
    server = {"backend": "openai", "endpoint": {"url": "http://127.0.0.1:1", "model": "policy"}}
    assert (
        parse_config({"run_id": "r", "generation": server | {"weight_sync": "mirror"}}).generation.backend == "openai"
    )
    for generation, text in (
        (server | {"weight_sync": "plain"}, "but generation.weight_sync is plain. Set it to store"),
        (
            {"weight_sync": "plain", "dtype": "float16"},
            "generation.weight_sync is plain, but generation.dtype is float16",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            parse_config({"run_id": "r", "generation": generation})


def test_a_package_adds_a_source_of_rows(site: Path) -> None:
    source = """
    from roundhouse.plugins import Plugin
    def rows(name, subset, split, limit):
        return ({"prompt": f"{name} {subset} {split} {number}"} for number in range(3))
    def right(completion):
        return 1.0
    ROWS = Plugin(rows)
    """
    install(site, "rh-rows", {"data_source.shelf": "rh_rows:ROWS"}, {"rh_rows": source})
    kind = {"kind": "dataset", "reward": "rh_rows:right", "heldout": 0, "data": "shelf:a/b", "subset": "s"}
    environment = parse_config({"run_id": "r", "environment": kind}).environment
    assert sorted(row["prompt"] for row in load_any(environment).tasks("train")) == [
        f"a/b s train {n}" for n in range(3)
    ]
    assert not has_local_rows(environment)
    with pytest.raises(ConfigError, match=r"data is shelf://a/b, a file"):
        parse_config({"run_id": "r", "environment": kind | {"data": "shelf://a/b"}})


def test_a_package_adds_an_agent_that_plays_whole_rollouts(site: Path) -> None:
    source = """
    from typing import ClassVar, Literal
    from roundhouse.config.environments import EnvironmentSection
    from roundhouse.plugins import Plugin

    class PlayedSection(EnvironmentSection):
        kind: Literal["played"]
        has_own_loop: ClassVar[bool] = True
        moves: int = 2

        def elsewhere(self):
            return "environment.kind is played, whose agent plays it alone."

    class Played:
        name, restoration = "played", "none"

        def __init__(self, section):
            self.agent = self
            self.moves = section.moves

        async def play(self, attempt, environment):
            attempt.rollout.reward = 1.0

    PLAYED = Plugin(Played, PlayedSection)
    """
    install(site, "rh-played", {"environment.played": "rh_played:PLAYED"}, {"rh_played": source})
    client: Any = open_environment(parse_config({"run_id": "r", "environment": {"kind": "played"}}).environment)
    assert (client.agent.moves, client.name) == (2, "played")
    with pytest.raises(ConfigError, match="whose own program plays a rollout"):
        parse_config({"run_id": "r", "environment": {"kind": "played"}, "rollout": {"branching": {"samples": 2}}})


def test_a_package_adds_an_engine_with_its_traits(site: Path) -> None:
    source = """
    from roundhouse.config.engines import EngineTraits
    from roundhouse.plugins import Plugin
    def open_echo(config, model_dir, served_name, codec):
        return (model_dir, served_name)
    ECHO = Plugin("no_such_module:Echo", traits=EngineTraits(open_echo, in_flow=True, arguments=frozenset(("size",))))
    """
    install(site, "rh-echo", {"engine.echo": "rh_echo:ECHO"}, {"rh_echo": source})
    config = parse_config({"run_id": "r", "generation": {"backend": "echo", "engine_args": {"size": 2}}})
    engine: Any = make_engine(config.generation, "model", "policy", Any)
    assert engine == ("model", "policy")
    assert "ray" not in needed_services(config), "the flow's process serves it"
    assert "sampling" not in engine_arguments(config.generation), "it receives the sampling with each request"
    assert unnamed_code(config, []) == {}, "a person installed the code"
    with pytest.raises(ConfigError, match=r"engine_args\.width: a custom engine takes none"):
        parse_config({"run_id": "r", "generation": {"backend": "echo", "engine_args": {"width": 2}}})


def test_a_package_translates_the_configuration_of_another_system(site: Path) -> None:
    source = """
    from roundhouse.plugins import Plugin
    def translate(tree, origin):
        return {"run_id": tree["name"], "iterations": tree["rounds"]} if "rounds" in tree else None
    ROUNDS = Plugin(translate)
    """
    install(site, "rh-rounds", {"translator.rounds": "rh_rounds:ROUNDS"}, {"rh_rounds": source})
    install(site, "rh-broken", {"translator.hole": "rh_broken:HOLE"}, {"rh_broken": "import no_such_package\n"}, "0.3")
    assert parse_config({"name": "r", "rounds": 7}).iterations == 7
    with pytest.raises(ConfigError, match=r"environment\.kind: 'maz' is unknown"):
        parse_config({"run_id": "r", "environment": {"kind": "maz"}})


def test_a_package_adds_commands_and_a_broken_one_disturbs_only_its_own(site: Path) -> None:
    source = """
    import typer
    from roundhouse.plugins import Plugin

    def walk(steps: int = 3):
        print(f"{steps} steps")

    mazes = typer.Typer(help="Mazes.")
    mazes.command()(walk)
    mazes.command("draw")(walk)
    WALK, MAZES = Plugin(walk, traits="Walk through a maze."), Plugin(mazes, traits="All about mazes.")
    """
    names = {"command.walk": "rh_walk:WALK", "command.mazes": "rh_walk:MAZES"}
    names |= {f"command.{group} walk": "rh_walk:WALK" for group in ("runs", "mazes", "paths")}
    install(site, "rh-walk", names, {"rh_walk": source})
    install(
        site,
        "rh-broken",
        {"command.hole": "rh_broken:HOLE", "command.runs hole": "rh_broken:HOLE"},
        {"rh_broken": "import no_such_package\n"},
        "0.3",
    )
    listed = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    assert "Walk through a maze." in listed
    assert "All about mazes." in listed
    assert "train" in listed
    assert CliRunner().invoke(app, ["walk", "--steps", "7"]).output == "7 steps\n"
    assert CliRunner().invoke(app, ["mazes", "draw"]).output == "3 steps\n"
    for group in ("runs", "mazes", "paths"):
        assert "Walk through a maze." in CliRunner().invoke(app, [group, "--help"], terminal_width=200).output
        assert CliRunner().invoke(app, [group, "walk"]).output == "3 steps\n"
    assert "rh-broken 0.3, which cannot be imported" in str(CliRunner().invoke(app, ["hole"]).exception)
    assert "rh-broken 0.3, which cannot be imported" in str(CliRunner().invoke(app, ["runs", "hole"]).exception)


def test_the_command_lists_plugins_and_fails_for_one_that_cannot_be_used(site: Path) -> None:
    install(site, "rh-broken", {"environment.hole": "rh_broken:HOLE"}, {"rh_broken": "import no_such_package\n"}, "0.3")
    listed = CliRunner().invoke(app, ["plugins", "list", "--json"])
    assert listed.exit_code == 1
    problems = {each["plugin"]: each["problem"] for each in json.loads(listed.output)}
    assert "no_such_package" in problems["environment.hole"]
    assert problems["environment.maze"] == ""
    assert "environment.maze  rh-maze 1.0\n" in CliRunner().invoke(app, ["plugins", "list"]).output


def test_each_built_in_kind_has_its_section_and_factory() -> None:
    for key, plugin in plugins.BUILT_IN.items():
        role, _, name = key.partition(".")
        assert plugins.factory(role, name) is not None  # type: ignore[arg-type]
        assert plugin.section is None or plugins.section(role, name) is not None  # type: ignore[arg-type]
    assert [kind_of(each) for each in Kinds("environment").sections()][:2] == ["calculator", "sort"]
