"""The catalogues in docs/ agree with the environments."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.environments import included_sections, load_any
from tests.gym.environments.playing import SPLITS
from tests.gym.kinds import needs

DOCS = Path(__file__).parents[3] / "docs"
CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def table(package: str) -> str:
    """Return the catalogue of the environments whose sections are in this package."""
    lines = ["| kind | task | tools | train / held out | example |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(lines + [_line(each) for each in included_sections() if each.__module__.startswith(package)])


def _line(config: type[Section]) -> str:
    kind = config.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]
    environment = load_any(CONFIG.validate_python({"kind": kind}))
    train, heldout = (len(environment.tasks(split)) for split in SPLITS)
    (shown,) = environment.demonstrations("train", 1, 1.0, seed=4)
    first = next(index for index, said in enumerate(shown) if said["role"] == "assistant")
    prompt = " / ".join(said["content"] for said in shown[:first])
    said = [f"{call['name']}({call['arguments']})" for call in _calls(shown)] + [shown[-1]["content"]]
    example = f"{_flat(prompt)} → {_flat(said[0])}" + (" → …" if len(said) > 1 else "")
    tools = ", ".join(f"`{tool['name']}`" for tool in environment.tool_schemas()) or "none"
    learnt = " ".join((config.__doc__ or "").split()).rstrip(".")
    return f"| `{kind}` | {learnt} | {tools} | {train} / {heldout} | {example} |"


def _calls(shown):
    return [call["function"] for said in shown for call in said.get("tool_calls", [])]


def _flat(text: str) -> str:
    return "`" + text.replace("\n", " ⏎ ").replace("|", "¦") + "`"


@pytest.mark.parametrize(
    ("package", "page"),
    [
        ("roundhouse.config", "environments.md"),
        pytest.param(
            "roundhouse.plugins.example_environments", "plugins/example-environments.md", marks=needs("lookup")
        ),
    ],
)
def test_the_catalogue_lists_every_kind_as_it_is(package: str, page: str) -> None:
    assert table(package) in (DOCS / page).read_text(), f"write `table({package!r})` into docs/{page}"
