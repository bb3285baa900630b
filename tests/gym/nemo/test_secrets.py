"""Masking."""

import pytest

from roundhouse.gym.nemo.secrets import MASK, masked


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "policy_api_key",
        "OPENAI_API_KEY",
        "hf_token",
        "hfToken",
        "password",
        "Authorization",
        "client-secret",
    ],
)
def test_values_under_secret_names_are_masked(key):
    assert masked({"a": {key: "sesame"}}) == {"a": {key: MASK}}
    assert masked({key: ["sesame", "open"]}) == {key: [MASK, MASK]}


def test_a_number_under_a_secret_name_is_masked():
    assert masked({"password": 1234, "api_key": 7}) == {"password": MASK, "api_key": MASK}


def test_counts_switches_and_unset_values_stay():
    tree = {
        "max_output_tokens": 64,
        "return_token_id_information": True,
        "api_key": None,
        "hf_token": "",
        "key": "???",
        "monkey": "see",
    }
    assert masked(tree) == tree


def test_everything_inside_a_mapping_of_secrets_is_masked():
    assert masked({"secrets": {"a": "x", "b": {"c": "y"}}}) == {"secrets": {"a": MASK, "b": {"c": MASK}}}


def test_the_user_part_of_a_url_is_masked():
    assert masked({"url": "https://me:sesame@host/v1"}) == {"url": f"https://{MASK}@host/v1"}
