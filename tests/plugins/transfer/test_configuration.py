"""Runs in which the transport cannot work are refused, and engines get vLLM's receiver from it."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse import plugins
from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.vllm_engine import engine_arguments
from roundhouse.plugins.transfer.transport import TransferOffer, TransferSource
from roundhouse.training.service.protocol import BeginTransfer, parse
from roundhouse.weight_sync.sending import TransferBegun
from tests.plugins.transfer.ends import offer_to


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"backend": "transformers"}, "generation.backend is transformers"),
        ({"transfer_backend": "nccl"}, "gpus_per_replica is 0"),
    ],
    ids=["backend", "transfer_backend"],
)
def test_a_run_in_which_it_cannot_work_is_refused(generation: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config({"run_id": "r", "generation": {"weight_sync": "transfer"} | generation})


def test_without_the_plugin_engines_get_no_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(gpus_per_replica=1, transfer_backend="nccl")
    assert engine_arguments(config, "/m")["weight_transfer_config"] == {"backend": "nccl"}
    monkeypatch.setattr(plugins, "__path__", [])
    assert "weight_transfer_config" not in engine_arguments(config, "/m")


def test_messages_to_a_trainer_keep_the_fields_of_the_transport() -> None:
    request = BeginTransfer(offer=offer_to(["a"], 1.5), digest="sha256:1")
    assert isinstance(request.offer, TransferOffer)
    assert parse(BeginTransfer, request.model_dump_json().encode()) == request
    source = TransferSource(dtype="float32", address="10.0.0.1", port=9, key="k", replicas=["a"], seconds=1.5)
    begun = TransferBegun(digest="sha256:1", source=source)
    assert TransferBegun.model_validate_json(begun.model_dump_json()).source == source


@pytest.mark.parametrize(
    ("kind", "problem"), [("store", "No trainer sends weights for the transport store"), ("pigeon", "pigeon")]
)
def test_an_offer_of_another_transport_is_refused(kind: str, problem: str) -> None:
    body = BeginTransfer(offer=offer_to(["a"], 1.5), digest="sha256:1").model_dump_json().replace("transfer", kind, 1)
    with pytest.raises(DataError, match=problem):
        parse(BeginTransfer, body.encode())
