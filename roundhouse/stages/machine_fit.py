"""Checks that a policy fits this machine and its ranks, and the settings that its files choose.

Invariant: a policy that is small relative to the memory costs no plan, which takes seconds.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.tool_formats import parser_of_template
from roundhouse.infra.checks.machine import available_memory, memory_plan, shape_of
from roundhouse.policy.gguf import gguf_file
from roundhouse.policy.model_directory import template_in, template_text
from roundhouse.store.location import Location
from roundhouse.store.stage import model_location

logger = logging.getLogger(__name__)


def policy_notes(config: RunConfig) -> list[str]:
    """Return a line for each setting that the files of a model on this machine choose: its key, its value and the reason."""
    policy = config.policy
    if policy.model is None or not (source := model_location(Location(policy.model))).is_local:
        return []
    if gguf_file(source.local_path) is not None:
        return []
    notes, name = [], getattr(policy, "chat_template", None)
    if config.generation.tool_call_parser == "auto":
        text = template_in(source.local_path).text if name is None else template_text(name)
        notes.append(f"generation.tool_call_parser is {parser_of_template(text)}, chosen by the chat template")
    if config.train.packing == "auto":
        problem = None
        if _model_type(policy.model) not in _PLAIN and (shape := shape_of(config)) is not None:
            from roundhouse.training.packed_attention import why_not_packed

            problem = why_not_packed(shape)
        reason = "" if problem is None else ": " + problem.partition(". ")[0]
        notes.append(f"train.packing is {str(problem is None).lower()}, chosen by the model{reason}")
    return notes


_PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Types of models that every section `train` fits on one rank; to see this of another takes seconds."""


def refuse_unfit_layout(config: RunConfig, remote: bool) -> None:
    """Refuse a model that cannot be packed, that the ranks cannot share, or that transformers does not know."""
    path = config.policy.model
    if path is not None and not remote and not Location(path).is_local:
        return
    shared = config.train.lora is not None and getattr(config.train.service, "processes", 1) > 1
    spread = shared or max(config.train.parallelism.values()) > 1
    if not spread and (path is None or _model_type(path) in (None, *_PLAIN)):
        return
    try:
        shape = shape_of(config)
        if shape is not None:
            from roundhouse.training import memory_plan as plan

            plan.refuse_unfit_layout(shape, config.train)
    except (ValueError, ImportError) as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"policy.path is {path}, which the installed transformers cannot build: {text} Name a model of an architecture "
            "that it has, or install what it names."
        ) from error


def _model_type(path: str) -> str | None:
    """Return the type in a model's config.json; None if it cannot be read, which `check_model_directory` reports."""
    source = model_location(Location(path))
    if not source.is_local or not (source.local_path / "config.json").is_file():
        return None
    try:
        kind = json.loads((source.local_path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return kind if isinstance(kind, str) else None


def refuse_unfit_memory(config: RunConfig) -> None:
    """Refuse a policy if its training step does not fit this machine: its first GPU, or a rank's share of free memory.

    On CPUs, skip the plan, which takes seconds, for a policy that is small relative to the memory.

    Raises:
        ConfigError: with the plan, and the settings that fit.
    """
    train, policy = config.train, config.policy
    if not train.service.is_on_this_machine:
        return
    if not config.infra.runs_here or not train.check_memory:
        return
    if policy.model is None or not (source := model_location(Location(policy.model))).is_local:
        return
    if train.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
        import torch

        if not torch.cuda.is_available():
            return
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = available_memory() // getattr(train.service, "processes", 1)
        if _BYTES_OF_A_STEP * sum(file.stat().st_size for file in source.local_path.glob("*.safetensors")) < memory:
            return
    try:
        findings = memory_plan(config, f"{memory / 1e9:.2f}GB", None)
    except ConfigError as error:
        logger.warning("%s", error)
        return
    for finding in findings:
        if finding.status == "fail":
            raise ConfigError(
                f"The training step {finding.detail}. {finding.remedy} Or set train.check_memory to false."
            )


_BYTES_OF_A_STEP = 8
"""For a byte of weights in bfloat16, before any activation: weights, gradient and two moments in float32."""


def refuse_small_memory(config: RunConfig, needed_gib: float) -> None:
    """Refuse a model that does not fit this machine's memory, if engine and trainer run on it.

    Raises:
        ConfigError: less memory is free.
    """
    if not config.infra.runs_here or config.generation.engine_url is not None:
        return
    free = available_memory() / 2**30
    if free < needed_gib:
        raise ConfigError(
            f"policy.name is {getattr(config.policy, 'name', None)}: its run takes about {needed_gib:g} GiB of memory, and "
            f"{free:.1f} GiB are free. End other programs, or start from a small policy (policy.kind warm_start)."
        )
