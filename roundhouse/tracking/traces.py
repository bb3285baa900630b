"""Rollouts as MLflow traces: agent, model calls, tool calls, verdict, with the reward as feedback.

Invariant: a trace contains only recorded data. A model call has its measured seconds; only the order of tool calls is
known, so their spans have length 0, and the root has the environment's seconds. A trace's request is the policy's
input messages, its response the text of its last answer.

    calculator/17/0          5.1 s    AGENT        messages -> answer; task, status       feedback: reward 1.0
      model call 0           0.8 s    CHAT_MODEL   generated items; tokens, finish reason, policy version
        calc                   –      TOOL         arguments, output
      model call 1           0.5 s    CHAT_MODEL
      verify                   –      EVALUATOR    reward and its components

Checkpoints as versions of a registered model in MLflow, with a link to their training data.

Invariant: a version points to the checkpoint in our store, copies nothing, and is registered once. The alias `promoted`
is on the store's promoted version, and a version with a deleted checkpoint is marked so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundhouse.stages.promotion import answer_to
from roundhouse.store.location import Location
from roundhouse.store.run import Run, promoted_version
from roundhouse.store.stage import StageKind, model_location, read_manifest
from roundhouse.trajectories.records import Rollout, Status, Turn, item_text

ROLLOUT_TAG = "roundhouse.rollout"
ITERATION_TAG = "roundhouse.iteration"
NANOSECONDS = 1_000_000_000
TRACES_A_PAGE = 500
"""Asked for at once."""


@dataclass(slots=True)
class ModelCall:
    """One turn's items: the policy's output, and its tools' answers."""

    said: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)


class TraceWriter:
    """Writes the rollouts of one run's iterations into its MLflow experiment."""

    def __init__(self, client: Any, experiment_id: str, mlflow_run_id: str, uid: str) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._mlflow_run_id = mlflow_run_id
        self._uid = uid

    def write(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Write a trace for each rollout without one in this iteration of the run.

        Raises:
            MlflowException: a trace has not arrived; MLflow's own exporter only logs that.
        """
        from mlflow.exceptions import MlflowException

        present = self._rollouts_there(iteration)
        written = [(self._write(each, iteration), each) for each in rollouts if each.rollout_id not in present]
        if written and (lost := {each.rollout_id for _, each in written} - self._rollouts_there(iteration)):
            raise MlflowException(f"traces of {', '.join(sorted(lost))} did not arrive")
        for trace_id, rollout in written:
            import mlflow
            from mlflow.entities import AssessmentSource

            if rollout.reward is not None:
                source = AssessmentSource(source_type="CODE", source_id=rollout.environment)
                mlflow.log_feedback(trace_id=trace_id, name="reward", value=rollout.reward, source=source)

    def _rollouts_there(self, iteration: int) -> set[str]:
        rollout_ids: set[str] = set()
        token: str | None = None
        while True:
            page = self._client.search_traces(
                locations=[self._experiment_id],
                filter_string=f"tags.`{UID_TAG}` = '{self._uid}' AND tags.`{ITERATION_TAG}` = '{iteration}'",
                max_results=TRACES_A_PAGE,
                page_token=token,
                include_spans=False,
            )
            rollout_ids |= {trace.info.tags[ROLLOUT_TAG] for trace in page}
            if not (token := page.token):
                return rollout_ids

    def _write(self, rollout: Rollout, iteration: int) -> str:
        client, start = self._client, int(rollout.started_at * NANOSECONDS)
        root = client.start_trace(
            name=rollout.rollout_id,
            span_type="AGENT",
            inputs={"messages": given_messages(rollout.items)},
            attributes={
                "environment": rollout.environment,
                "task": rollout.task,
                "status": rollout.status.value,
                "reward": rollout.reward,
                "finish_reason": rollout.finish_reason,
                "attempt": rollout.attempt,
                "seed": rollout.seed,
                "turns": len(rollout.turns),
                "generation_seconds": rollout.generation_seconds,
                "environment_seconds": rollout.environment_seconds,
                "failure": f"{rollout.failure_code}: {rollout.failure_detail}" if rollout.failure_code else "",
            },
            tags={ROLLOUT_TAG: rollout.rollout_id, ITERATION_TAG: str(iteration), UID_TAG: self._uid},
            experiment_id=self._experiment_id,
            start_time_ns=start,
            run_id=self._mlflow_run_id,
        )
        now = start
        for call, turn in zip_turns(rollout):
            now = self._model_call(root, call, turn, now)
        if rollout.reward is not None:
            span = self._client.start_span(
                "verify", root.trace_id, root.span_id, span_type="EVALUATOR", start_time_ns=now
            )
            verdict = {"reward": rollout.reward, "components": rollout.reward_components, "metrics": rollout.metrics}
            self._client.end_span(root.trace_id, span.span_id, outputs=verdict, end_time_ns=now)
        client.end_trace(
            root.trace_id,
            outputs=answer_text(rollout),
            status="ERROR" if rollout.status is Status.FAILED else "OK",
            end_time_ns=max(now, start + int(rollout.seconds * NANOSECONDS)),
        )
        return root.trace_id

    def _model_call(self, root: Any, call: ModelCall, turn: Turn | None, now: int) -> int:
        """Write one model call and its tools; return when it ended."""
        client = self._client
        name = "model call" if turn is None else f"model call {turn.turn}"
        span = client.start_span(name, root.trace_id, root.span_id, span_type="CHAT_MODEL", start_time_ns=now)
        end = now if turn is None else now + int(turn.latency_seconds * NANOSECONDS)
        answers = {answer.get("call_id"): answer.get("output") for answer in call.answered}
        for request in (item for item in call.said if item.get("type") == "function_call"):
            tool = client.start_span(
                request.get("name", "tool"),
                root.trace_id,
                span.span_id,
                span_type="TOOL",
                inputs={"arguments": request.get("arguments")},
                start_time_ns=end,
            )
            client.end_span(
                root.trace_id, tool.span_id, outputs={"output": answers.get(request.get("call_id"))}, end_time_ns=end
            )
        of_turn: dict[str, Any] = {}
        if turn is not None:
            of_turn = {
                "prompt_tokens": turn.prompt_length,
                "generated_tokens": len(turn.generation_token_ids),
                "finish_reason": turn.finish_reason,
                "policy_version": turn.policy_version,
            }
        client.end_span(root.trace_id, span.span_id, outputs={"items": call.said}, attributes=of_turn, end_time_ns=end)
        return end


def zip_turns(rollout: Rollout) -> Iterator[tuple[ModelCall, Turn | None]]:
    """Return the conversation's model calls with their turns; a turn is None if the agent's record has more calls
    than turns."""
    calls = model_calls(rollout.items)
    for number, call in enumerate(calls):
        yield call, rollout.turns[number] if number < len(rollout.turns) else None


def model_calls(items: Sequence[dict[str, Any]]) -> list[ModelCall]:
    """Split a conversation into model calls: the policy's items up to the next foreign item."""
    calls: list[ModelCall] = []
    speaking = False
    for item in items:
        if _is_the_policys(item):
            if not speaking:
                calls.append(ModelCall())
            calls[-1].said.append(item)
            speaking = True
        else:
            speaking = False
            if item.get("type") == "function_call_output" and calls:
                calls[-1].answered.append(item)
    return calls


def given_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the policy's input before its first reply, as chat messages."""
    initial = itertools.takewhile(lambda item: not _is_the_policys(item), items)
    return [{"role": item.get("role", "user"), "content": item_text(item)} for item in initial]


def answer_text(rollout: Rollout) -> str:
    """The text of the policy's last message; of a rollout that ended without one, how it ended."""
    messages = [item for item in rollout.items if _is_the_policys(item) and item.get("type", "message") == "message"]
    if messages and rollout.status is not Status.FAILED:
        return item_text(messages[-1])
    return f"({rollout.status.value}: {rollout.failure_code or rollout.finish_reason or 'no message'})"


def _is_the_policys(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


ALIAS = "promoted"
VERSION_TAG = "roundhouse.policy_version"
UID_TAG = "roundhouse.uid"
APPROVAL_TAG = "roundhouse.approval"
STATE_TAG = "roundhouse.checkpoint_state"
DELETED = "deleted"


def register_checkpoint(client: Any, run: Run, version: int, mlflow_run_id: str) -> str | None:
    """Register an evaluated checkpoint, update the model from the store, and return the registered model's name.

    None when registration is off, or no checkpoint is known. A deleted one is registered as deleted.
    """
    name = model_name(run)
    evaluation = run.stage(version, StageKind.EVALUATE).reference()
    checkpoint = run.checkpoint(version).reference()
    if checkpoint is None and evaluation is not None:  # retention was quicker than MLflow
        checkpoint = read_manifest(evaluation).inputs.get("checkpoint")
    if name is None or checkpoint is None:
        return None
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if registered_version(client, name, run, version) is None:
        place = model_location(Location(checkpoint.uri)).uri  # the Hugging Face directory
        path = place.removeprefix("file://")
        description = (
            f"Policy version {version} of run {run.run_id}: the Hugging Face directory `{path}`. MLflow stores no copy."
        )
        tags = {
            VERSION_TAG: str(version),
            UID_TAG: run.uid,
            "roundhouse.run_id": run.run_id,
            "roundhouse.checkpoint": checkpoint.uri,
            "roundhouse.model": place,
            "roundhouse.checkpoint_digest": checkpoint.digest,
            "roundhouse.code_version": run.code_version,
        }
        for kind in (StageKind.COLLECT, StageKind.VALIDATE):
            stage = run.stage(version, kind).reference()
            if stage is not None:
                tags[f"roundhouse.{kind}"] = f"{stage.uri}@{stage.digest}"
        measured = {} if evaluation is None else read_manifest(evaluation).metrics
        if (reward := measured.get("evaluation/reward/mean")) is not None:  # missing if every rollout failed
            tags["roundhouse.heldout_reward"] = f"{reward:.4f}"
        client.create_model_version(
            name,
            source="roundhouse" + place.removeprefix("file") if place.startswith("file://") else place,
            run_id=mlflow_run_id,
            tags=tags,
            description=description,
        )
    follow_store(client, run)
    return name


def follow_store(client: Any, run: Run) -> None:
    """Set the alias on the promoted version, show people's answers, and mark versions with deleted checkpoints."""
    name = model_name(run)
    if name is None:
        return
    promoted = promoted_version(run)
    for model_version in client.search_model_versions(f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}'"):
        version = int(model_version.tags[VERSION_TAG])
        if version == promoted and ALIAS not in client.get_model_version(name, model_version.version).aliases:
            client.set_registered_model_alias(name, ALIAS, model_version.version)
        if APPROVAL_TAG not in model_version.tags and (answer := answer_to(run, version)) is not None:
            client.set_tag(model_version.run_id, f"{APPROVAL_TAG}.{version}", str(answer))
            client.set_model_version_tag(name, model_version.version, APPROVAL_TAG, str(answer))
        if model_version.tags.get(STATE_TAG) != DELETED and run.checkpoint(version).reference() is None:
            client.set_model_version_tag(name, model_version.version, STATE_TAG, DELETED)
            reason = "**Deleted from the store by retention** (`checkpoint.keep_last`, `keep_every`)."
            client.update_model_version(name, model_version.version, f"{reason} {model_version.description or ''}")


def delete_versions(client: Any, run: Run) -> None:
    """Delete the run's model versions, and the registered model if no other run has a version of it."""
    name = model_name(run)
    if name is None:
        return
    for version in client.search_model_versions(f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}'"):
        client.delete_model_version(name, version.version)
    known = client.search_registered_models(f"name = '{name}'")
    if known and not client.search_model_versions(f"name = '{name}'"):
        client.delete_registered_model(name)


def model_name(run: Run) -> str | None:
    """Name of the run's registered model; None when registration is off."""
    template = run.config.tracking.register_as
    return None if template is None else template.format(run_id=run.run_id)


def registered_version(client: Any, name: str, run: Run, version: int) -> Any | None:
    versions = client.search_model_versions(
        f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}' and tags.`{VERSION_TAG}` = '{version}'"
    )
    return client.get_model_version(name, versions[0].version) if versions else None
