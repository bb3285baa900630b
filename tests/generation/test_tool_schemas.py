"""Definitions and unions of a tool's schema are shown by every template, or the tool is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from roundhouse.environments import Calculator
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import BadRequest
from roundhouse.generation.tool_schemas import shown_tools
from roundhouse.policy.model_directory import ChatTemplate, refuse_unfit_template
from roundhouse.policy.tokenizer import CHAT_TEMPLATE, blank_tokenizer, render
from roundhouse.rollout.responses import chat_tools


class Filter(BaseModel):
    needle: str
    within: list[Filter] | None = None


class Search(BaseModel):
    filter: Filter
    size: int | None = None
    order: int | str = 1


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "parameters": schema}}


USER = {"role": "user", "content": "?"}
NESTED = tool(Search.model_json_schema())
FLAT = tool({"type": "object", "properties": {"size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}})
READS_TYPE = (
    "{% for t in tools or [] %}{{ t.function.name }}({% for n, p in t.function.parameters.properties.items() %}"
    "{{ n }}={{ p['type'] }} {% endfor %}){% endfor %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
)


def test_definitions_stand_in_their_place_and_unions_have_a_type() -> None:
    [shown] = shown_tools([NESTED])
    properties = shown["function"]["parameters"]["properties"]
    assert "$ref" not in str(shown)
    assert "$defs" not in str(shown)
    assert properties["filter"]["properties"]["needle"]["type"] == "string"
    within = properties["filter"]["properties"]["within"]
    assert (within["type"], within["nullable"], within["items"]["type"]) == ("array", True, "object")
    assert (properties["size"]["type"], properties["size"]["nullable"]) == ("integer", True)
    assert properties["order"]["type"] == ["integer", "string"]


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"type": ["string", "null"], "enum": ["$ref"], "default": {"anyOf": []}}},
        },
        {"type": "object", "properties": {"$ref": {"type": "string"}, "anyOf": {"type": "array", "items": {}}}},
        {},
    ],
    ids=["data", "names", "empty"],
)
def test_a_schema_without_references_and_unions_is_unchanged(schema: dict[str, Any]) -> None:
    tools = [tool(schema), {"type": "function", "function": {"name": "bare"}}, *chat_tools(Calculator().tool_schemas())]
    assert shown_tools(tools) == tools


def test_all_parts_of_an_intersection_are_shown() -> None:
    parts = [{"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"$ref": "#/definitions/B"}]
    schema = {"allOf": parts, "definitions": {"B": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}}
    [shown] = shown_tools([tool(schema)])
    assert shown["function"]["parameters"] == {
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/Gone"}}}, r"refers to #/\$defs/Gone, which is missing in it"),
        ({"properties": {"a": {"$ref": "https://example.org/a.json"}}}, "refers to https://example.org"),
        (
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}} for n in range(40)
                }
                | {"d40": {"type": "string"}},
            },
            "more than 20000 parts",
        ),
        ({"allOf": [{"properties": 5}]}, "has properties in a part of allOf: int"),
        ({"allOf": [{"required": "ab"}]}, "has required in a part of allOf: str"),
    ],
    ids=["missing", "elsewhere", "growing", "properties", "required"],
)
def test_a_schema_that_cannot_be_shown_names_the_tool(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRequest, match=f"The tool search: its schema .*{problem}"):
        shown_tools([tool(schema)])
    with pytest.raises(ConfigError, match="The tool search: "):
        refuse_unfit_template(ChatTemplate("ours", CHAT_TEMPLATE), [tool(schema)])


def test_the_warm_starts_template_shows_arguments_within_arguments() -> None:
    text = render(blank_tokenizer(), [USER], shown_tools([NESTED]))
    assert '"filter": {"needle": "string", "within": "array"}' in text
    assert '"size": "integer", "order": "integer" | "string"}' in text
    refuse_unfit_template(ChatTemplate("ours", CHAT_TEMPLATE), [NESTED])
    listed = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}}
    listed_tool = tool({"properties": {"points": listed}})
    assert '{"points": [{"x": "number"}]}' in render(blank_tokenizer(), [USER], [listed_tool])


def test_a_template_that_reads_types_is_refused_where_it_hides_an_argument() -> None:
    calls = READS_TYPE + "{# tool #}"
    refuse_unfit_template(ChatTemplate("model", calls), [FLAT])
    with pytest.raises(ConfigError, match=r"shows nothing of filter\.needle, filter\.within of the tool search"):
        refuse_unfit_template(ChatTemplate("model", calls), [NESTED])
    mapping = tool({"properties": {"m": {"additionalProperties": {"properties": {"x": {"type": "number"}}}}}})
    with pytest.raises(ConfigError, match=r"shows nothing of m\.x of the tool search"):
        refuse_unfit_template(ChatTemplate("ours", CHAT_TEMPLATE), [mapping])
