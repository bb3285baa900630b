import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from roundhouse.config.loading import load_config
from roundhouse.config.models import (
    CalculatorEnvironment,
    CustomEnvironment,
    EnvironmentConfig,
    SortEnvironment,
)
from roundhouse.environments import Calculator, load
from roundhouse.environments.base import Toolbox, marked_tools, tool
from roundhouse.environments.generated import GeneratedEnvironment
from roundhouse.errors import ConfigError
from tests.gym.environments.playing import rewards_of

EXAMPLES = Path(__file__).parents[3] / "docs/examples"

ADAPTER: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


@pytest.mark.parametrize("kind", ["calculator", "sort", "countdown"])
def test_each_kind_loads_the_environment_of_that_name(kind: str) -> None:
    assert load(ADAPTER.validate_python({"kind": kind})).name == kind


def test_the_configuration_reaches_the_environment() -> None:
    assert len(load(CalculatorEnvironment(heldout_fraction=0)).tasks("heldout")) == 0
    assert len(load(SortEnvironment(digits=2, heldout_fraction=0)).tasks("train")) == 72


def test_a_custom_environment_is_imported_by_name_with_its_parameters() -> None:
    config = CustomEnvironment(
        kind="custom", target="roundhouse.environments.calculator:Calculator", parameters={"heldout_fraction": 0.5}
    )
    environment = load(config)
    assert isinstance(environment, Calculator)
    assert 380 < len(environment.tasks("heldout")) < 500


async def test_the_tutorials_environment_is_loaded_from_its_file_and_its_right_demonstrations_are_right() -> None:
    environment = load(CustomEnvironment(kind="custom", target=f"{EXAMPLES / 'stockroom.py'}:Stockroom"))
    assert isinstance(environment, GeneratedEnvironment)
    assert await rewards_of(environment, True, 40) == [1.0] * 40
    assert 0 < sum(await rewards_of(environment, False, 40)) < 40
    settings = load_config(EXAMPLES / "stockroom.yaml").environment
    assert isinstance(settings, CustomEnvironment)
    assert Path(settings.target.split(":")[0]) == EXAMPLES / "stockroom.py"


@pytest.mark.parametrize(
    ("target", "parameters", "said"),
    [
        ("no_such_file.py:Weather", {}, "no file no_such_file.py"),
        ("no_such_package.weather:Weather", {}, "importing no_such_package.weather failed"),
        ("roundhouse.environments:Weather", {}, "has no Weather"),
        ("roundhouse.errors:ConfigError", {}, "which is not of type Environment or GymnasiumEnvironment"),
        ("roundhouse.environments:Calculator", {"holdout": 1}, "environment.parameters"),
    ],
)
def test_a_custom_environment_that_cannot_be_made_names_the_key(target: str, parameters: dict, said: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        load(CustomEnvironment(kind="custom", target=target, parameters=parameters))
    assert said in str(caught.value)


def test_holding_out_everything_is_refused_at_the_configuration() -> None:
    with pytest.raises(ValidationError, match="less than 1"):
        CalculatorEnvironment(heldout_fraction=1.0)
    with pytest.raises(ConfigError, match="no task is left to train on"):
        Calculator(heldout_fraction=1.0)


class Colour(BaseModel):
    red: int


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("kind", "schema", "value"),
    [
        (str, TEXT, "a"),
        (inspect.Parameter.empty, TEXT, "a"),
        (int, NUMBER, 1),
        (list[str], {"type": "array", "items": TEXT}, ["a"]),
        (dict, {"type": "object", "additionalProperties": True}, {"a": 1}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, "b"),
        (int | None, {"anyOf": [NUMBER, {"type": "null"}]}, None),
        (Annotated[int, Field(ge=1)], NUMBER | {"minimum": 1}, 1),
        (list[Colour], {"type": "array", "items": {"$ref": "#/$defs/Colour"}}, [{"red": 1}]),
    ],
    ids=str,
)
async def test_a_call_that_follows_the_schema_of_a_tool_is_accepted(
    kind: Any, schema: dict[str, Any], value: Any
) -> None:
    async def show(self: Any, session: Any, given: Any) -> str:
        return "shown"

    show.__annotations__["given"] = kind
    if kind is inspect.Parameter.empty:
        del show.__annotations__["given"]
    shown = type("Shown", (), {"show": tool("Show.", given="It.")(show), "tools": marked_tools})()
    parameters = shown.tools()["show"].parameters
    assert parameters["properties"] == {"given": schema | {"description": "It."}}
    assert set(parameters.get("$defs", {})) == ({"Colour"} if "Colour" in str(kind) else set())
    assert (await Toolbox(shown).call(None, "show", {"given": value})).ok


class Shouts(Exception):
    """An error that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no text")


async def test_errors_of_tools_are_logged_and_shown_in_bounds(caplog: pytest.LogCaptureFixture) -> None:
    """A message of 50 MB was a log line of 50 MB, and each distinct error text made a log line per rollout."""

    async def fail(self: Any, session: Any, how: int) -> str:
        raise Shouts if how < 0 else ValueError(f"{how} " + "x" * 50_000)

    failing = type("Failing", (), {"fail": tool("Fail.", how="How.")(fail), "tools": marked_tools})()
    toolbox = Toolbox(failing)
    results = [await toolbox.call(None, "fail", {"how": how}) for how in range(-1, 120)]
    assert "to show it raises ValueError" in results[0].text
    assert all(len(each.text) < 11_000 for each in results)
    assert len(caplog.messages) == 100
    assert max(map(len, caplog.messages)) < 11_000
