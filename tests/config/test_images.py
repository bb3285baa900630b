"""Which settings fit a policy that sees (`generation.images`)."""

from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.config.models import RunConfig

SEES: dict[str, Any] = {
    "run_id": "sees",
    "policy": {"kind": "pretrained", "path": "model"},
    "environment": {"kind": "custom", "target": "shapes.py:CountShapes"},
    "generation": {"backend": "transformers", "images": True},
    "train": {"packing": False},
}


def test_a_policy_that_sees_is_trained_unpacked_in_one_process() -> None:
    assert RunConfig.model_validate(SEES).generation.images
    assert RunConfig.model_validate(SEES | {"generation": {"backend": "vllm", "images": True}}).generation.images


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"train": {}}, "but train.packing is auto. Set it to false"),
        ({"policy": {"kind": "warm_start"}}, "but policy.kind is warm_start. Set it to pretrained"),
        (
            {"generation": {"backend": "trainer", "images": True}},
            "but generation.backend is trainer. Set it to vllm or",
        ),
        ({"train": {"packing": False, "service": {"kind": "ray"}}}, "but train.service.kind is ray"),
        (
            {"train": {"packing": False, "service": {"kind": "resident", "processes": 2}}},
            "but train.service.processes is 2. Set it to 1",
        ),
        (
            {"generation": {"backend": "vllm", "images": True, "weight_sync": "trainer"}},
            "but generation.weight_sync is trainer. Set it to store",
        ),
        ({"rollout": {"max_prompt_tokens": 8}}, "but rollout.max_prompt_tokens is 8. Leave it out"),
    ],
    ids=["packing", "policy", "backend", "service", "processes", "transport", "prompts"],
)
def test_what_cannot_see_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=f"generation.images is true, {problem}"):
        RunConfig.model_validate(SEES | changes)
