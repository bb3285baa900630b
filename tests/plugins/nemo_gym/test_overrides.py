"""Command-line overrides as text."""

import pytest

from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.config.sources import nested, parse_override


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", ""),
        ("hello", "hello"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("a b", "a b"),
        ("'1'", "1"),
        ('"it\'s"', "it's"),
        (r"'it\'s'", "it's"),
        ("[a, 1, null]", ["a", 1, None]),
        ("[]", []),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("{a: 1, b: {c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("{'a b': x}", {"a b": "x"}),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("[${a.b}, ${c}]", ["${a.b}", "${c}"]),
        (r"a\,b", "a,b"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_reads_as_its_users_mean_it(text, value):
    assert parse_override(f"+k={text}").value == value


def test_the_four_forms_name_what_to_do():
    assert [parse_override(text).action for text in ("+a.b=1", "++a.b=1", "a.b=1", "~a.b")] == [
        "set",
        "set",
        "change",
        "remove",
    ]
    assert parse_override("~a.b").path == ("a", "b")
    assert not parse_override("~a.b").has_value
    assert parse_override("~a.b=1").value == 1


@pytest.mark.parametrize("text", ["a", "+a", "=1", "+=1", "a..b=1", "+++a=1", "~", "+a b=1"])
def test_anything_else_is_refused_with_its_text(text):
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", ["[1, 2", "{a: 1", "{a}", "'open", "[1] 2", "[1 2, {]"])
def test_an_unfinished_value_is_refused(value):
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_override(f"+k={value}")


def test_a_dotted_key_becomes_nested_mappings():
    assert nested(("a", "b"), [1]) == {"a": {"b": [1]}}
