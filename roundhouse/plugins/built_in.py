"""The declaration of a plug-in, and the table of the core's plug-ins.

Invariant: the table holds strings, so that importing it imports no plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugin:
    """One kind of one role. A string `module:name` is imported when a configuration uses the kind."""

    factory: str | Callable[..., Any]
    """The class or function that makes it; docs/plugins.md states its arguments for each role."""
    section: str | type[Any] | None = None
    """Configuration section: a `roundhouse.config.section.Section` with a key `kind: Literal["name"]`. None: the role is chosen
    by name alone."""
    check: str | Callable[[Any], None] | None = None
    """Function of the section that raises a ConfigError before a run starts, for conditions that the section cannot know: a
    package, a file, a server."""
    traits: Any = None
    """Facts that the core asks before it imports the factory, of the type that docs/plugins.md states for the role."""
    packages: tuple[str, ...] = ()
    """Requirements of a separate interpreter, which `roundhouse plugins install NAME` makes."""
    extra: str = ""
    """Extra of Roundhouse with the packages that it imports."""


def _environment(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.{factory}", f"roundhouse.config.environments:{section}Environment")


def _included(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.environments.{factory}", f"roundhouse.config.included_environments:{section}Environment")


def _algorithm(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.training.algorithms.{factory}", f"roundhouse.config.algorithms:{section}Config")


def _loss(name: str) -> Plugin:
    return Plugin(f"roundhouse.training.loss:{name}_loss", traits=f"roundhouse.config.algorithms:{name.upper()}")


def _curriculum(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.rollout.plan:{factory}", f"roundhouse.config.rollout:{section}")


def _engine(factory: str, traits: str) -> Plugin:
    return Plugin(f"roundhouse.generation.{factory}", traits=f"roundhouse.config.engines:{traits}")


def _transport(factory: str, traits: str) -> Plugin:
    return Plugin(f"roundhouse.{factory}", traits=f"roundhouse.config.generation:{traits}")


def _train_service(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.launch.train_services:{factory}", f"roundhouse.config.training:{section}Service")


def _policy(section: str, factory: str) -> Plugin:
    return Plugin(f"roundhouse.policy.{factory}", f"roundhouse.config.training:{section}Policy")


BUILT_IN: Mapping[str, Plugin] = {
    "policy.pretrained": _policy("Pretrained", "existing:PretrainedModel"),
    "policy.bundled": _policy("Bundled", "existing:BundledModel"),
    "policy.warm_start": _policy("WarmStart", "starting:WarmStart"),
    "environment.calculator": _included("Calculator", "calculator:Calculator"),
    "environment.sort": _included("Sort", "single_turn:Sort"),
    "environment.arithmetic_chain": _included("ArithmeticChain", "calculator:ArithmeticChain"),
    "environment.countdown": _included("Countdown", "single_turn:Countdown"),
    "environment.sudoku": _included("Sudoku", "single_turn:Sudoku"),
    "environment.instruction_constraints": _included("InstructionConstraints", "single_turn:InstructionConstraints"),
    "environment.custom": _environment("Custom", "environments:load_any"),
    "environment.dataset": _environment("Dataset", "environments.dataset:RewardedDataset"),
    "environment.mixture": _environment("Mixture", "rollout.clients:open_mixture"),
    "sandbox.local": Plugin(
        "roundhouse.environments.sandboxes.local:LocalProcess", "roundhouse.config.sandboxes:LocalSandbox"
    ),
    "sandbox.custom": Plugin(
        "roundhouse.environments.sandboxes:load_custom", "roundhouse.config.sandboxes:CustomSandbox"
    ),
    "data_source.hf": Plugin("roundhouse.environments.dataset:hub_rows"),
    "algorithm.grpo": _algorithm("GRPO", "built_in:GroupRelative"),
    "algorithm.dr_grpo": _algorithm("DrGRPO", "built_in:GroupRelative"),
    "algorithm.rloo": _algorithm("RLOO", "built_in:GroupRelative"),
    "algorithm.dapo": _algorithm("DAPO", "built_in:GroupRelative"),
    "algorithm.gspo": _algorithm("GSPO", "built_in:GroupRelative"),
    "algorithm.cispo": _algorithm("CISPO", "built_in:GroupRelative"),
    "algorithm.reinforce_plus_plus": _algorithm("ReinforcePlusPlus", "built_in:ReinforcePlusPlus"),
    "algorithm.ppo": _algorithm("PPO", "ppo:PPO"),
    "algorithm.gdpo": _algorithm("GDPO", "built_in:GDPO"),
    "algorithm.cross_entropy": _algorithm("CrossEntropy", "built_in:CrossEntropy"),
    "algorithm.distillation": _algorithm("Distillation", "built_in:OnPolicyDistillation"),
    "algorithm.custom": Plugin(
        "roundhouse.training.algorithms:load_custom", "roundhouse.config.algorithms:CustomAlgorithmConfig"
    ),
    "loss.clipped": _loss("clipped"),
    "loss.cispo": _loss("cispo"),
    "loss.reinforce": _loss("reinforce"),
    "curriculum.epochs": _curriculum("Epochs", "draw_epochs"),
    "curriculum.success_band": _curriculum("SuccessBand", "SuccessBandCurriculum"),
    "curriculum.custom": _curriculum("CustomCurriculum", "load_custom"),
    "engine.vllm": _engine("interface:VllmGeneration", "VLLM"),
    "engine.transformers": _engine("interface:TransformersGeneration", "TRANSFORMERS"),
    "engine.openai": _engine("openai_engine:OpenAIEngine", "OPENAI"),
    "engine.trainer": _engine("trainer_engine:TrainerEngine", "TRAINER"),
    "endpoint.tokens": Plugin("roundhouse.generation.openai_engine:OpenAIEngine"),
    "endpoint.text": Plugin("roundhouse.generation.openai_engine:TextEngine"),
    "weight_transport.store": _transport("weight_sync.base:CheckpointTransport", "CHECKPOINT_FILES"),
    "weight_transport.trainer": _transport("generation.trainer_engine:TrainersWeights", "TRAINERS_WEIGHTS"),
    "launcher.subprocess": Plugin("roundhouse.launch.subprocesses:SubprocessLauncher"),
    "launcher.ray": Plugin("roundhouse.launch.ray_actors:RayLauncher"),
    "train_service.resident": _train_service("Resident", "open_resident"),
    "train_service.process": _train_service("Process", "refuse_process"),
    "train_service.ray": _train_service("Ray", "open_ray"),
    "train_service.remote": _train_service("Remote", "open_remote"),
    "sink.mlflow": Plugin("roundhouse.tracking.tracker:open_tracker"),
    "sink.json_lines": Plugin("roundhouse.tracking.sinks:JsonLinesSink"),
}
"""From `role.name` to the plug-in, in the order of the reference page."""
