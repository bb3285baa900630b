"""Rollouts rewarded by a rubric: a scripted judge over HTTP, its stored answers, and its failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.collection.collector import rollout_metrics
from roundhouse.config.consent import unnamed_code
from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.rubrics import Audit, Rubric
from roundhouse.environments import load_to_serve
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import ContextOverflow
from roundhouse.http.ports import HttpThread
from roundhouse.infra.checks.reachability import configured
from roundhouse.rollout.agents import play_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.rubric import read_verdict, refuse_unfit_criteria
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.cost import bill_of
from roundhouse.stages.datasets import dataset_versions
from roundhouse.stages.report import report_iteration
from roundhouse.store.stage import read_manifest
from roundhouse.store.verification import verify as verify_store
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.counter import counter_row
from tests.gym.playground import SAMPLING, ScriptedPolicy, rollout_config, says, spec_of
from tests.gym.recorded import collected, demonstrated, opened

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)
JUDGING = "tests.gym.judging"
"""Functions that score; a process that loads them imports little."""
FAST_RETRY = {"attempts": 2, "first_delay_seconds": 0.001}
Told = tuple[int, Any]


@dataclass
class JudgeEndpoint:
    """An OpenAI-compatible endpoint; `reply` gives status and text (or whole body) of each request."""

    reply: Callable[[dict[str, Any]], Told] = lambda body: (200, "It is. Verdict: yes")
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        self.requests.append(asked)
        self.keys.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        status, told = self.reply(asked)
        if told is None:  # says nothing until the client has gone
            await receive()
            return
        if isinstance(told, str) and status == 200:
            usage = {"prompt_tokens": 30, "completion_tokens": 7}
            told = {"choices": [{"message": {"role": "assistant", "content": told}}], "usage": usage}
        data = json.dumps(told).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def rubric(self, **changes: Any) -> dict[str, Any]:
        criteria = {"right": {"question": "Is it right?"}}
        return {"criteria": criteria, "judge": {"base_url": self.url, "model": "judge-1"}} | changes


@pytest.fixture
def judge() -> Iterator[JudgeEndpoint]:
    endpoint = JudgeEndpoint()
    server = HttpThread(endpoint, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.port}/v1"
    yield endpoint
    server.close()


def counter(rubric: dict[str, Any]) -> EnvironmentConfig:
    return CONFIG.validate_python({"kind": "custom", "target": "tests.gym.counter:Counter", "rubric": rubric})


async def play(
    rubric: dict[str, Any], store: Path | None = None, row: TaskRow | None = None, script: Any = None, **config: Any
) -> Rollout:
    policy = ScriptedPolicy(script or (lambda messages, seed: says("Paris.")))
    async with open_environment(counter(rubric), None if store is None else str(store)) as environment:
        attempt = await play_rollout(
            spec_of(row), policy, environment, rollout_config(**{"retry": FAST_RETRY} | config), SAMPLING
        )
    assert attempt.answer is None or attempt.rollout.reward in (None, attempt.answer["reward"])
    return attempt.rollout


async def audited(audit: dict[str, Any], count: int = 1, on_policy: bool = True) -> list[Rollout]:
    """Rollouts of the counter, rewarded with 1 by its own verifier, under this audit."""
    config = CONFIG.validate_python({"kind": "custom", "target": "tests.gym.counter:Counter", "audit": audit})
    async with open_environment(config) as environment:
        policy = ScriptedPolicy(lambda messages, seed: says("Paris."))
        attempts = [
            await play_rollout(spec, policy, environment, rollout_config(), SAMPLING, on_policy=on_policy)
            for spec in (spec_of(counter_row(verdict="right"), seed=number) for number in range(count))
        ]
    return [attempt.rollout for attempt in attempts]


def kept_in(store: Path) -> int:
    return len([*store.glob("judgements/*/*.json")])


async def test_the_reward_is_the_weighted_mean_of_the_criteria_each_a_component(judge: JudgeEndpoint) -> None:
    judge.reply = lambda body: (
        200,
        "Verdict: 4" if "from 0 to 10" in body["messages"][1]["content"] else "Well.\n**Verdict:** YES",
    )
    criteria = {
        "right": {"question": "Is it right?", "weight": 3},
        "style": {"question": "How well is it said?", "scale": [0, 10]},
        "short": {"function": f"{JUDGING}:half"},
        "true": {"function": f"{JUDGING}:truth"},
    }
    rollout = await play(judge.rubric(criteria=criteria, own_weight=2, shown=["answer"]), row=counter_row(answer="P"))
    own = rollout.reward_components.pop("environment") / 2 * 8
    assert rollout.reward_components == pytest.approx(
        {"right": 3 / 8, "style": 0.4 / 8, "short": 0.5 / 8, "true": 1 / 8}
    )
    plain = await play(judge.rubric(criteria={"short": criteria["short"]}, judge=None))
    assert plain.reward == 0.5
    assert rollout.reward == pytest.approx((3 + 0.4 + 0.5 + 1 + 2 * own) / 8)
    assert {name: value for name, value in rollout.metrics.items() if name.startswith("judge")} == {
        "judge_calls": 2,
        "judge_prompt_tokens": 60,
        "judge_completion_tokens": 14,
    }
    system, user = judge.requests[0]["messages"]
    evidence = json.loads(user["content"].partition("\n\n")[0])
    assert evidence["task"] == {"answer": "P"}
    assert "strict judge" in system["content"]
    assert evidence["conversation"][-1]["content"][0]["text"] == "Paris."


async def test_the_endpoint_gets_what_is_configured_and_the_key_by_its_variable(
    judge: JudgeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_JUDGE", "abc")
    section = {"base_url": judge.url, "model": "m", "api_key_variable": "OF_THE_JUDGE", "temperature": 0.7}
    await play(judge.rubric(judge=section | {"max_tokens": 9, "instructions": "Be kind."}))
    [asked] = judge.requests
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.7, 9)
    assert asked["messages"][0] == {"role": "system", "content": "Be kind."}
    assert judge.keys == ["Bearer abc"]
    monkeypatch.delenv("OF_THE_JUDGE")
    with pytest.raises(ConfigError, match="OF_THE_JUDGE, which is not set"):
        open_environment(counter(judge.rubric(judge=section)))


PANEL = """
import asyncio
from roundhouse.rollout.rubric import Answer

class Panel:
    asked = []

    def __init__(self, judge):
        self.model = judge.model

    async def ask(self, messages):
        self.asked.append((self.model, [each["role"] for each in messages]))
        if self.model == "away" and len(self.asked) == 1:
            raise ConnectionError("no route")
        if self.model == "slow":
            await asyncio.sleep(60)
        if self.model == "broken":
            raise KeyError("text")
        return "yes" if self.model == "text" else Answer("Verdict: yes", 3, 2)
"""


@pytest.mark.parametrize(
    ("model", "calls", "error"),
    [
        ("panel", 1, None),
        ("away", 2, None),
        ("slow", 2, "judge_failed"),
        ("broken", 1, "judge_refused"),
        ("text", 2, "judge_unreadable"),
    ],
)
async def test_a_judge_service_of_the_user_is_asked_retried_counted_and_cached(
    model: str, calls: int, error: str | None, tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text(PANEL)
    section = {"service": f"{tmp_path}/judges.py:Panel", "model": model, "timeout_seconds": 0.05}
    rubric = {"criteria": {"right": {"question": "Is it right?"}}, "judge": section}
    rollout, again = [await play(rubric, tmp_path / "store") for _ in range(2)]
    assert rollout.metrics["judge_calls"] == calls
    if error is not None:
        assert rollout.failure_code == error
        assert rollout.reward is None
        return
    assert (rollout.reward, rollout.metrics["judge_prompt_tokens"]) == (1.0, 3)
    assert again.metrics["judge_cached"] == 1


@pytest.mark.parametrize(
    ("judge", "text"),
    [
        ({"service": "a:B"}, "judge.service is a:B, but judge.model is unset"),
        (
            {"service": "a:B", "model": "m", "base_url": "http://a/v1"},
            "judge.base_url is set, but judge.service is a:B",
        ),
        ({"service": "panel", "model": "m"}, "'panel' is not a judge service: no plug-in has one"),
    ],
)
def test_a_judge_service_that_cannot_be_is_refused(judge: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as error:
        counter({"criteria": {"right": {"question": "Is it right?"}}, "judge": judge})
    assert text in str(error.value)


async def test_a_conversation_is_judged_once_and_anew_by_another_model_prompt_or_question(
    judge: JudgeEndpoint, tmp_path: Path
) -> None:
    first, again = [await play(judge.rubric(), tmp_path) for _ in range(2)]
    assert len(judge.requests) == 1
    assert (first.reward, again.reward) == (1.0, 1.0)
    assert (first.metrics["judge_calls"], again.metrics["judge_cached"]) == (1, 1)
    assert "judge_calls" not in again.metrics
    own = {"base_url": judge.url, "model": "judge-1"}
    others = [
        {"judge": own | {"model": "judge-2"}},
        {"judge": own | {"instructions": "Be kind."}},
        {"criteria": {"right": {"question": "Is it quite right?"}}},
        {"criteria": {"right": {"question": "Is it right?", "scale": [0, 1]}}},
    ]
    judge.reply = lambda body: (200, "Verdict: 1" if "number" in body["messages"][1]["content"] else "Verdict: no")
    assert [(await play(judge.rubric(**other), tmp_path)).reward for other in others] == [0, 0, 0, 1]
    assert len(judge.requests) == 5
    await play(judge.rubric(), tmp_path, script=lambda messages, seed: says("Rome."))
    assert len(judge.requests) == 6, "another conversation"
    assert kept_in(tmp_path) == 6


YES = {"choices": [{"message": {"content": "Verdict: yes"}}]}


@pytest.mark.parametrize(
    ("told", "code", "calls"),
    [
        ((429, {"error": {"code": "insufficient_quota"}}), "judge_quota", 1),
        ((402, {"error": "pay"}), "judge_quota", 1),
        ((429, {"error": "slow down"}), "judge_failed", 2),
        ((500, {"error": "gone"}), "judge_failed", 2),
        ((401, {"error": "who?"}), "judge_refused", 1),
        ((200, "Hard to say."), "judge_unreadable", 2),
        ((200, "Verdict: 7"), "judge_unreadable", 2),
        ((200, {"choices": []}), "judge_unreadable", 2),
        ((200, {**YES, "usage": {"prompt_tokens": 10**30}}), "judge_unreadable", 2),
        ((200, {**YES, "usage": {"prompt_tokens": -1}}), "judge_unreadable", 2),
        ((307, {}), "judge_refused", 1),
        ((200, None), "judge_failed", 2),
    ],
    ids=str,
)
async def test_a_judge_that_gives_no_verdict_fails_the_rollout_with_the_cause_and_no_reward(
    judge: JudgeEndpoint, tmp_path: Path, told: Told, code: str, calls: int
) -> None:
    judge.reply = lambda body: told
    section = {"base_url": judge.url, "model": "judge-1", "timeout_seconds": 0.3 if told[1] is None else 30}
    rollout = await play(judge.rubric(judge=section), tmp_path, timeout_seconds=20 if told[1] is None else 60)
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, code, None), rollout.failure_detail
    assert rollout.reward_components == {}
    assert len(judge.requests) == rollout.metrics["judge_calls"] == calls
    assert kept_in(tmp_path) == 0


async def test_a_call_that_fails_is_made_again(judge: JudgeEndpoint) -> None:
    told = iter([(503, {"error": "busy"}), (200, "Verdict: yes")])
    judge.reply = lambda body: next(told)
    rollout = await play(judge.rubric())
    assert (rollout.reward, rollout.metrics["judge_calls"]) == (1.0, 2)


async def test_a_judge_that_nobody_is_at_fails_the_rollout() -> None:
    rubric = {"criteria": {"a": {"question": "?"}}, "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}
    rollout = await play(rubric)
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, "judge_failed")


@pytest.mark.parametrize(("function", "code"), [("raises", "verifier_failed"), ("too_much", "bad_reward")])
async def test_a_function_that_gives_no_score_fails_the_rollout(function: str, code: str) -> None:
    rollout = await play({"criteria": {"mine": {"function": f"{JUDGING}:{function}"}}})
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, code, None)


async def test_a_field_that_the_row_lacks_fails_the_rollout(judge: JudgeEndpoint) -> None:
    rollout = await play(judge.rubric(shown=["answer"]))
    assert (rollout.failure_code, judge.requests) == ("bad_task_row", [])


async def test_a_conversation_that_is_too_long_for_the_runs_own_judge_fails_the_rollout_as_refused() -> None:
    def full(messages: list[dict[str, Any]], seed: int) -> Any:
        if messages[0]["role"] == "system":
            raise ContextOverflow("The prompt has 300 tokens")
        return says("Paris.")

    rollout = await play({"criteria": {"right": {"question": "Is it right?"}}, "judge": {}}, script=full)
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, "judge_refused", None)
    assert "generation.max_model_len" in rollout.failure_detail


async def test_no_more_calls_are_in_flight_than_are_allowed(judge: JudgeEndpoint) -> None:
    policy = ScriptedPolicy(lambda messages, seed: says("Verdict: yes"), seconds=0.01)
    criteria = {f"c{number}": {"question": f"{number}?"} for number in range(6)}
    for most in (1, 6):
        policy.busiest = 0
        async with open_environment(counter({"criteria": criteria, "judge": {"concurrency": most}})) as environment:
            await play_rollout(spec_of(), policy, environment, rollout_config(), SAMPLING)
        assert policy.busiest == most


@pytest.mark.parametrize(("function", "agrees"), [("half", 1.0), ("nothing_right", 0.0)])
async def test_an_audit_says_whether_it_agrees_and_leaves_the_reward_alone(function: str, agrees: float) -> None:
    [plain] = await audited({"criteria": {"a": {"function": f"{JUDGING}:half"}}, "reward_at_least": 2})
    [rollout] = await audited({"criteria": {"a": {"function": f"{JUDGING}:{function}"}}})
    assert "audit_agrees" not in plain.metrics, "its reward is below reward_at_least"
    assert rollout.metrics["audit_agrees"] == agrees
    assert (rollout.reward, rollout.reward_components) == (plain.reward, plain.reward_components)
    [strict] = await audited({"criteria": {"a": {"function": f"{JUDGING}:half"}}, "agrees_at": 0.6})
    assert strict.metrics["audit_agrees"] == 0
    metrics = rollout_metrics([plain, rollout, strict])
    assert (metrics["audit/rollouts"], metrics["audit/refused"]) == (2, 2 - agrees)


async def test_an_audit_looks_at_a_share_of_the_rollouts_that_are_trained_on_the_same_each_time() -> None:
    audit = {"criteria": {"a": {"function": f"{JUDGING}:half"}}, "share": 0.4}
    looked = [["audit_agrees" in each.metrics for each in await audited(audit, count=60)] for _ in range(2)]
    assert looked[0] == looked[1]
    assert 12 <= sum(looked[0]) <= 36
    assert not any(each.metrics.keys() & {"audit_agrees"} for each in await audited(audit, 60, on_policy=False))


async def test_an_audit_that_gives_no_verdict_fails_no_rollout(judge: JudgeEndpoint) -> None:
    judge.reply = lambda body: (401, {"error": "who?"})
    [rollout] = await audited(judge.rubric())
    assert (rollout.status, rollout.reward, rollout.metrics["audit_failed"]) == (Status.COMPLETED, 1.0, 1)
    assert "audit_agrees" not in rollout.metrics


def test_stored_rollouts_are_judged_anew_without_an_audit(judge: JudgeEndpoint) -> None:
    judge_all = pytest.importorskip("roundhouse.plugins.lab.replays.verdicts").judge_all
    config = CONFIG.validate_python({"kind": "calculator", "audit": judge.rubric()})
    assert [each.outcome for each in judge_all(demonstrated(config, 1), config)] == ["equal"] * 4
    assert judge.requests == []


@pytest.mark.parametrize(
    ("rubric", "problem"),
    [
        ({"criteria": {}, "judge": {}}, "criteria"),
        ({"criteria": {"a": {"question": "?"}}}, "judge is unset"),
        ({"criteria": {"a": {"function": "m:f"}}, "judge": {}}, "no criterion has a question"),
        ({"criteria": {"a": {}}, "judge": {}}, "neither of question and function"),
        ({"criteria": {"a": {"question": "?", "function": "m:f"}}, "judge": {}}, "both of question and function"),
        ({"criteria": {"a": {"question": "?", "scale": [3, 1]}}, "judge": {}}, "scale is"),
        ({"criteria": {"a": {"function": "m:f", "scale": [0, 1]}}}, "Leave scale out"),
        ({"criteria": {"a": {"question": "?", "weight": 0}}, "judge": {}}, "weight"),
        ({"criteria": {"environment": {"question": "?"}}, "judge": {}, "own_weight": 1}, "Rename it"),
        ({"criteria": {"a": {"question": "?"}}, "judge": {"base_url": "http://h/v1"}}, "model is unset"),
        ({"criteria": {"a": {"question": "?"}}, "judge": {"model": "m"}}, "base_url is unset"),
        ({"criteria": {"a": {"question": "?"}}, "judge": {"temperature": 1}}, "base_url is unset"),
    ],
)
def test_a_rubric_that_cannot_work_is_refused_when_it_is_read(rubric: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Rubric.model_validate(rubric)


def test_a_judge_that_does_not_judge_is_refused_before_the_run(judge: JudgeEndpoint) -> None:
    rubric = Rubric.model_validate(judge.rubric())
    refuse_unfit_criteria(rubric, "environment.rubric", ask=True)
    assert len(judge.requests) == 1
    judge.reply = lambda body: (401, {"error": "who?"})
    with pytest.raises(ConfigError, match=r"environment\.rubric\.judge\.base_url .* does not judge as judge-1.*401"):
        refuse_unfit_criteria(rubric, "environment.rubric", ask=True)
    refuse_unfit_criteria(rubric, "environment.rubric", ask=False)
    with pytest.raises(ConfigError, match=r"environment\.audit\.judge\.base_url"):
        refuse_unfit_criteria(Audit.model_validate(judge.rubric()), "environment.audit", ask=True)
    missing = Rubric.model_validate({"criteria": {"mine": {"function": f"{JUDGING}:nothing"}}})
    with pytest.raises(ConfigError, match=r"rubric\.criteria\.mine\.function .* no function nothing"):
        refuse_unfit_criteria(missing, "environment.rubric", ask=False)


def test_the_doctor_asks_the_judge(judge: JudgeEndpoint) -> None:
    environment = {"kind": "calculator", "rubric": judge.rubric()}
    config = parse_config(
        {"run_id": "r", "environment": environment, "generation": {"engine_url": "http://127.0.0.1:1"}}
    )
    for told, status in ((200, "ok"), (402, "fail")):
        judge.reply = lambda body, told=told: (told, "Verdict: no")
        [finding] = [each for each in configured(config) if each.name == "judge"]
        assert (finding.status, str(told) in finding.detail) == (status, told == 402)


def test_a_function_of_a_stored_configuration_counts_as_code() -> None:
    rubric = {"criteria": {"mine": {"function": "mine.py:score"}}}
    config = parse_config({"run_id": "r", "environment": {"kind": "calculator", "rubric": rubric}})
    assert unnamed_code(config, []) == {"environment.rubric.criteria.mine.function": "mine.py:score"}


def test_verdicts_are_read_from_the_end_of_an_answer() -> None:
    yes_or_no, score = (
        Rubric.model_validate({"criteria": {"a": {"question": "?", **more}}, "judge": {}}).criteria["a"]
        for more in ({}, {"scale": [-1, 1]})
    )
    assert read_verdict("Verdict: no, at first.\nVerdict: yes", yes_or_no) == 1
    assert read_verdict("<think>Verdict: yes</think> verdict = **No**", yes_or_no) == 0
    assert read_verdict("Verdict: -0.5", score) == 0.25
    assert read_verdict('"verdict": 1.', score) == 1


def test_an_environment_that_is_served_has_no_rubric() -> None:
    with pytest.raises(ConfigError, match="judges in the run"):
        load_to_serve(CONFIG.validate_python({"kind": "calculator", "rubric": FUNCTION}))


FUNCTION = {"criteria": {"half": {"function": f"{JUDGING}:half"}}}


def test_stored_rollouts_are_judged_anew_at_the_price_of_one_call_each(judge: JudgeEndpoint, tmp_path: Path) -> None:
    rescore = pytest.importorskip("roundhouse.plugins.lab.replays.verdicts").rescore
    judge.reply = lambda body: (200, f"Verdict: {'yes' if '7' in body['messages'][1]['content'] else 'no'}")
    run = opened(tmp_path, {"kind": "calculator"})
    rollouts = demonstrated(run.config.environment, tasks=3)
    collected(run, 1, rollouts)
    override = f"environment.rubric={json.dumps(judge.rubric())}"
    diff = rescore(run.config.store, run.run_id, "judged", overrides=[override])
    assert diff.counts["refused"] == 0
    assert diff.counts["equal"] + diff.counts["flipped"] == len(rollouts)
    (version,) = dataset_versions(run.config.store, "judged")
    after = read_rollouts(version)
    assert {each.reward for each in after} == {0.0, 1.0}
    asked = len(judge.requests)
    assert sum(each.metrics.get("judge_calls", 0) for each in after) == asked > 0
    assert bill_of(run)["tokens"]["judged"] == 7 * asked
    assert bill_of(run)["unpriced_judge_tokens"] == {"judge-1": 37 * asked}
    shown = CliRunner().invoke(app, ["runs", "cost", run.run_id, "--store", run.config.store]).stdout
    assert f"judge-1: {37 * asked:,} tokens without a price" in shown
    rescore(run.config.store, run.run_id, "again", overrides=[override])
    assert len(judge.requests) == asked, "the store has the answers"
    assert bill_of(run)["tokens"]["judged"] == 7 * asked
    assert not verify_store(run.config.store).problems
    judge.reply = lambda body: (401, {"error": "who?"})
    failing = json.dumps(judge.rubric(judge={"base_url": judge.url, "model": "judge-2"}))
    diff = rescore(run.config.store, run.run_id, "failing", overrides=[f"environment.rubric={failing}"])
    assert diff.reasons == {"judge_refused": len(rollouts)}
    (version,) = dataset_versions(run.config.store, "failing")
    assert {(each.status, each.reward, each.failure_code) for each in read_rollouts(version)} == {
        (Status.FAILED, None, "judge_refused")
    }


def test_judges_are_paid_by_the_token_each_by_its_model_and_one_without_a_price_is_named(tmp_path: Path) -> None:
    """A mixture of four judges and one function; of the iteration's report and the bill alike."""
    judges: dict[str, Any] = {
        name: {"base_url": "http://h/v1", "model": model}
        for name, model in (("a", "large"), ("b", "small"), ("c", "unknown"))
    }
    parts = {
        name: {"kind": "calculator", "rubric": {"criteria": {"q": {"question": "?"}}, "judge": judge}}
        for name, judge in (judges | {"d": {}}).items()
    } | {"e": {"kind": "calculator"}}
    run = opened(tmp_path, {"kind": "mixture", "environments": parts})
    prices = {"judges": {"large": {"prompt": 2, "completion": 10}, "small": {"prompt": 0, "completion": 1}}}
    config = parse_config(run.config.model_dump(mode="json") | {"cost": {"prices": prices}})
    run = replace(run, config=config)
    used = {"judge_prompt_tokens": 1e6, "judge_completion_tokens": 1e5}
    rollouts = [
        Rollout(f"{name}/0/t", 0, {}, name, Status.COMPLETED, reward=1.0, metrics={} if name == "e" else used)
        for name in parts
    ]
    collected(run, 1, rollouts)
    bill = bill_of(run)
    assert bill["tokens"]["judged"] == 4e5
    assert bill["money"] == {"judged": pytest.approx(2 + 1 + 0.1)}
    assert bill["unpriced_judge_tokens"] == {"unknown": 1.1e6}
    report = read_manifest(report_iteration(run, 1)).metrics
    assert report["cost/total"] == pytest.approx(3.1)
    assert (report["cost/judge_prompt_tokens"], report["cost/judge_completion_tokens"]) == (4e6, 4e5)


def test_a_budget_in_money_needs_the_price_of_every_judge(judge: JudgeEndpoint) -> None:
    tree = {"run_id": "r", "environment": {"kind": "calculator", "rubric": judge.rubric()}}
    budget = {"budget": {"money": 5}}
    with pytest.raises(
        ConfigError, match=r"budget\.money is 5, but environment\.rubric\.judge\.model is judge-1.*prices\.judges"
    ):
        parse_config(tree | {"cost": budget})
    free = {"judges": {"judge-1": {"prompt": 0, "completion": 0}}}
    assert parse_config(tree | {"cost": budget | {"prices": free}}).cost.budget.money == 5


def test_rollouts_of_a_program_are_judged_anew_by_a_rubric_alone(judge: JudgeEndpoint) -> None:
    judge_all = pytest.importorskip("roundhouse.plugins.lab.replays.verdicts").judge_all
    open_for_replay = pytest.importorskip("roundhouse.plugins.lab.replays.rollouts").open_for_replay
    stored = demonstrated(CONFIG.validate_python({"kind": "calculator"}), tasks=1, size=2)
    program = {"kind": "command", "command": ["true"], "rubric": judge.rubric()}
    judged = judge_all(stored, CONFIG.validate_python(program))
    assert [each.after.reward for each in judged if each.after is not None] == [1.0, 1.0]
    mixture = {"kind": "mixture", "environments": {"team": program | {"train_tasks": "none.jsonl"}}}
    with pytest.raises(ConfigError):
        open_for_replay(CONFIG.validate_python(mixture))
    for rubric, problem in (
        (judge.rubric(own_weight=1), "its own loop plays the rollouts"),
        (judge.rubric(judge={}), "base_url is unset"),
    ):
        with pytest.raises(ConfigError, match=problem):
            open_for_replay(CONFIG.validate_python(program | {"rubric": rubric}))
