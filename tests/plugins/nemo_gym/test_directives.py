"""`_inherit_from`, `_copy`, `_delete_key` on plain trees."""

import pytest

from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.config.merging import apply_directives


def test_an_inherited_source_is_moved_and_overridden():
    tree = {"generic": {"host": "a", "n": {"x": 1, "y": 2}}, "math": {"_inherit_from": "generic", "n": {"y": 3}}}
    assert apply_directives(tree) == {"math": {"host": "a", "n": {"x": 1, "y": 3}}}


def test_a_copied_source_stays():
    tree = {"policy": {"model": "tiny"}, "judge": {"_copy": "policy", "model": "large"}}
    assert apply_directives(tree) == {"policy": {"model": "tiny"}, "judge": {"model": "large"}}


def test_single_values_are_moved_and_copied_from_a_dotted_path():
    tree = {"grpo": {"n": 4, "m": 5}, "a": {"n": "${inherit_from:grpo.n}"}, "b": "${copy:grpo.m}"}
    assert apply_directives(tree) == {"grpo": {"m": 5}, "a": {"n": 4}, "b": 5}


def test_several_targets_may_inherit_one_source_in_any_order_of_keys():
    tree = {"a": {"_inherit_from": "z"}, "z": {"v": 1}, "b": {"_inherit_from": "z", "v": 2}}
    assert apply_directives(tree) == {"a": {"v": 1}, "b": {"v": 2}}


def test_a_source_that_is_itself_made_from_another_is_followed():
    tree = {"a": {"_inherit_from": "b", "x": 3}, "b": {"_inherit_from": "c", "x": 2}, "c": {"x": 1, "y": 1}}
    assert apply_directives(tree) == {"a": {"x": 3, "y": 1}}


def test_deleted_keys_go_from_the_own_and_from_the_inherited_values():
    tree = {"base": {"x": 1, "y": 2, "z": 3}, "own": {"_inherit_from": "base", "w": 4, "_delete_key": "w, y"}}
    assert apply_directives(tree) == {"own": {"x": 1, "z": 3}}
    assert apply_directives({"a": {"x": 1, "y": "${copy:nowhere}", "_delete_key": "y"}}) == {"a": {"x": 1}}


def test_directives_work_inside_lists():
    assert apply_directives({"s": {"v": 1}, "l": [{"_copy": "s"}, 2]}) == {"s": {"v": 1}, "l": [{"v": 1}, 2]}


def test_an_unset_source_leaves_its_target_unset():
    tree = {"a": "???", "b": {"_copy": "a.c"}, "c": "${copy:a}", "d": {"_copy": "a", "x": 1}}
    assert apply_directives(tree) == {"a": "???", "b": "???", "c": "???", "d": "???"}


def test_an_unset_value_of_the_target_does_not_hide_the_inherited_one():
    assert apply_directives({"a": {"x": 1}, "b": {"_copy": "a", "x": "???"}})["b"] == {"x": 1}


def test_plain_interpolations_stay_as_they_are():
    tree = {"model": {"url": "${base_url}"}, "judge": {"_copy": "model"}}
    assert apply_directives(tree)["judge"] == {"url": "${base_url}"}


def test_the_original_tree_is_left_alone():
    tree = {"a": {"x": [1]}, "b": {"_inherit_from": "a"}}
    apply_directives(tree)["b"]["x"].append(2)
    assert tree == {"a": {"x": [1]}, "b": {"_inherit_from": "a"}}


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"a": {"_inherit_from": "nowhere"}}, "'nowhere'"),
        ({"s": {"x": 1}, "a": {"_copy": "s.y"}}, "s has no 'y'; it has: x"),
        ({"a": {"_copy": "b"}, "b": {"_copy": "a"}}, "made from itself"),
        ({"a": {"b": {"_copy": "a"}}}, "which holds it"),
        ({"s": 1, "a": {"_copy": "s"}}, "not a mapping"),
        ({"s": {"x": 1}, "a": {"_copy": "s", "_delete_key": "y"}}, "'y'"),
        ({"a": {"_delete_key": ["x"]}}, "separated by commas"),
        ({"a": {"_copy": 3}}, "dotted path"),
    ],
)
def test_a_directive_that_cannot_work_is_named(tree, named):
    with pytest.raises(ConfigError) as caught:
        apply_directives(tree)
    assert named in str(caught.value)
