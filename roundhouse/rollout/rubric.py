"""Rewards by a rubric: weighted criteria, each a question to a language model or a function.

Invariants: a rollout has a reward exactly if every criterion has a score. A missing score fails the rollout with a
typed cause and never counts as 0. The reward is the weighted mean of scores from 0 to 1; each criterion's part is a
component of the same name. A judge is asked once: its answer is stored by the digest of model, instructions, question
and content, so judging an equal conversation again makes no call, and a change of any of these makes a new one.

    criteria  right   weight 3   "Is the town right?"        verdict: yes        1      component 3/4 · 1   = 0.75
              short   weight 1   rules.py:short              0.5                        component 1/4 · 0.5 = 0.125
                                                                                        reward              = 0.875

    <store>/judgements/<digest of judge and question>/<digest of the content>.json

Answers of the run's engine depend on its weights; each rollout records their version (`judge_policy_version`). These
answers are cached in memory for the newest version, with a seed from question and content, so a version gives a
conversation one verdict.

An audit scores rewarded rollouts by separate criteria and changes only their metrics: `audit_agrees` is 1 or 0,
`audit_failed` counts missing scores. An audit never fails a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import orjson

from roundhouse import plugins
from roundhouse.activity import run_interruptible
from roundhouse.config.rollout import RetryPolicy
from roundhouse.config.rubrics import Audit, Criteria, Criterion, Rubric
from roundhouse.config.secrets import read_secret
from roundhouse.environments.base import BadReward, Verdict
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.generation.client import JSON_HEADERS
from roundhouse.generation.protocol import EngineRejected
from roundhouse.http.clients import client_session
from roundhouse.http.replies import MALFORMED, read_reply
from roundhouse.imports import load_function
from roundhouse.rollout.agents import RolloutAttempt, checked_verdict
from roundhouse.rollout.hosted import HostedFunctions
from roundhouse.rollout.protocol import (
    Agent,
    BadTaskRow,
    ClosedOnExit,
    EnvironmentClient,
    JudgeFailed,
    results_together,
    retry_delay,
)
from roundhouse.store.location import AlreadyExists, Location, NotFound
from roundhouse.strict_json import read_json
from roundhouse.trajectories.records import SEEDS, Rollout, Status, derive_seed
from roundhouse.trajectories.storable import LARGEST, shown
from roundhouse.user_code import describe_error

log = logging.getLogger(__name__)

CALLS, CACHED, PROMPT_TOKENS, COMPLETION_TOKENS = "calls", "cached", "prompt_tokens", "completion_tokens"
VERSION = "policy_version"
"""The oldest version of the run's own engine that answered."""
PREFIXES = {"rubric": "judge", "audit": "audit"}
"""Metrics of a rollout that was judged are `judge_calls` and so on, those of its audit `audit_calls`."""
JUDGE_METRICS = frozenset(
    f"{prefix}_{name}"
    for prefix in PREFIXES.values()
    for name in (CALLS, CACHED, PROMPT_TOKENS, COMPLETION_TOKENS, VERSION)
)
OWN = "environment"
"""Component of the environment's own reward."""
YES_OR_NO = 'Give your reasons in a few sentences. End with one line: "Verdict: yes" or "Verdict: no".'
SCORE = 'Give your reasons in a few sentences. End with one line: "Verdict: " and a number from {0:g} to {1:g}.'
_VERDICT = re.compile(r"verdict[\s:*=\"]{1,6}(yes|no|[-+]?\d+(?:\.\d+)?)(?![\w.]*\w)", re.IGNORECASE)
PASSING = frozenset({408, 409, 425, 429})
"""Status codes that may succeed on a retry, in addition to 5xx."""


class JudgeQuota(InfraError):
    """The judge's endpoint refuses to answer until somebody pays, or a limit of usage has passed."""


class JudgeRefused(DataError):
    """The judge's endpoint refuses the request."""


class JudgeUnreadable(DataError):
    """The judge answered without a verdict that can be read."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the judge."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    policy_version: int | None = None
    """Oldest version that drew any of its tokens, of the run's own engine."""
    mixed: bool = False
    """A refit came in between: several versions drew it."""


class JudgeService(Protocol):
    """A class of the user, made with the section `judge`, in place of an endpoint."""

    async def ask(self, messages: list[dict[str, Any]]) -> Answer:
        """Return the judge's answer to a conversation of system and user message.

        It must not block the event loop. An OSError is retried like a failed call of an endpoint; any other error refuses the
        question.
        """
        ...


class RubricJudge:
    """Scores the rollouts of one environment by a rubric or an audit. Used and closed in one event loop."""

    def __init__(self, section: Criteria, store: str | None = None) -> None:
        """
        Args:
            store: keeps the judge's answers; None: nothing does.

        Raises:
            ConfigError: a function cannot be imported, or the variable of the key is not set.
        """
        self.section, self.judge = section, section.judge
        self.key, self._prefix = f"environment.{section.name}", PREFIXES[section.name]
        targets = {
            f"{self.key}.criteria.{name}.function": each.function
            for name, each in section.criteria.items()
            if each.function is not None
        }
        for key, target in targets.items():
            load_function(target, key)
        self._functions = HostedFunctions("roundhouse.environments.operations:of_functions", targets, self.key)
        self._has_functions = bool(targets)
        self._headers = dict(JSON_HEADERS)
        if self.judge is not None and (variable := self.judge.api_key_variable) is not None:
            if (secret := read_secret(variable)) is None:
                raise ConfigError(f"{self.key}.judge.api_key_variable is {variable}, which is not set. Set it.")
            self._headers["Authorization"] = f"Bearer {secret}"
        self._service: JudgeService | None = None
        if self.judge is not None and (service := self.judge.service) is not None:
            service_class: Any = plugins.chosen("judge", service, object, f"{self.key}.judge.service")
            self._service = service_class(self.judge)
        self._cache = None if store is None else Location(store) / "judgements"
        self._own: dict[str, Answer] = {}
        """Answers of the run's own engine at version `_own_version`, by the keys of `_cache`."""
        self._own_version = -1
        self._gate = asyncio.Semaphore(1 if self.judge is None else self.judge.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def begin(self) -> None:
        """Start the process of the functions, so that no rollout's limit has to wait for its imports."""
        if self._has_functions:
            await self._functions.__aenter__()

    async def close(self) -> None:
        """End the process of the functions, and close the connections to the judge."""
        await self._functions.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, rollout: Rollout, retry: RetryPolicy, attempt: RolloutAttempt | None = None) -> None:
        """Write the rubric's verdict into a rollout that already has its environment's verdict.

        Args:
            retry: policy for calls that fail or return an unreadable answer.
            attempt: provides the engine that judges if the rubric names no endpoint.

        Raises:
            JudgeFailed, JudgeQuota, JudgeRefused, JudgeUnreadable: the judge gave no verdict.
            VerifierFailed, BadReward: a function raised or returned an invalid score.
            BadTaskRow: the row lacks a field that the judge needs.
        """
        components = await self._parts(rollout, retry, attempt)
        verdict = checked_verdict(Verdict(math.fsum(components.values()), components))
        rollout.reward, rollout.reward_components = verdict.reward, verdict.reward_components

    async def _parts(self, rollout: Rollout, retry: RetryPolicy, attempt: RolloutAttempt | None) -> dict[str, float]:
        """Return each part of the weighted mean, including the environment's reward."""
        assert rollout.reward is not None, "its environment has judged it"
        criteria = self.section.criteria
        scoring = (self._score(name, each, rollout, retry, attempt) for name, each in criteria.items())
        scores = dict(zip(criteria, await results_together(scoring), strict=True))
        weights = {name: each.weight for name, each in criteria.items()}
        if weight := self.section.weight_of_environment:
            weights[OWN], scores[OWN] = weight, rollout.reward
        total = math.fsum(weights.values())
        return {name: weight / total * scores[name] for name, weight in weights.items()}

    async def _score(
        self, name: str, criterion: Criterion, rollout: Rollout, retry: RetryPolicy, attempt: RolloutAttempt | None
    ) -> float:
        """From 0 to 1."""
        if criterion.question is None:
            return await self._computed(name, rollout)
        content = self._shown(rollout)
        key = f"{self._version(criterion)}/{_digest(content)}.json"
        if (earlier := await self._kept(key, attempt)) is not None:
            self._count(rollout, {CACHED: 1})
            self._note_version(rollout, earlier)
            return read_verdict(earlier.text, criterion)
        seed = derive_seed(rollout.seed, "judge", name)
        for number in range(1, retry.attempts + 1):
            try:
                messages = self._messages(criterion, content)
                answer = await self._asked(messages, rollout, attempt, derive_seed(key, number))
                score = read_verdict(answer.text, criterion)
            except (JudgeFailed, JudgeUnreadable) as error:
                if number == retry.attempts:
                    raise
                if isinstance(error, JudgeFailed):
                    await asyncio.sleep(retry_delay(retry, number, seed))
            else:
                await self._keep(key, answer, criterion)
                return score
        raise AssertionError("there is at least one attempt")

    async def _computed(self, name: str, rollout: Rollout) -> float:
        key = f"{self.key}.criteria.{name}.function"
        score = await self._functions.call(key, rollout.task, rollout.items)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise BadReward(f"{key} returned {shown(score)}; it must return a number from 0 to 1.")
        return float(score)

    def _shown(self, rollout: Rollout) -> str:
        """The evidence: what of the task row the judge may see, and the conversation."""
        if missing := [name for name in self.section.shown if name not in rollout.task]:
            raise BadTaskRow(f"{self.key}.shown names {missing[0]}, which the task row has not.")
        items = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in rollout.items]
        task = {name: rollout.task[name] for name in self.section.shown}
        return orjson.dumps({"task": task, "conversation": items}).decode()

    def _messages(self, criterion: Criterion, shown: str) -> list[dict[str, Any]]:
        assert self.judge is not None, "the section was checked"
        question = f"{shown}\n\nQuestion: {criterion.question}\n\n{_form(criterion)}"
        return [{"role": "system", "content": self.judge.instructions}, {"role": "user", "content": question}]

    def _version(self, criterion: Criterion) -> str:
        """Digest of everything but the evidence that decides about an answer."""
        assert self.judge is not None, "the section was checked"
        keys = {"base_url", "model", "instructions", "temperature", "max_tokens"}
        if self.judge.service is not None:
            keys.add("service")
        settings = self.judge.model_dump(include=keys)
        return _digest(orjson.dumps([settings, criterion.question, _form(criterion)]).decode())

    async def _kept(self, key: str, attempt: RolloutAttempt | None) -> Answer | None:
        """Return an earlier answer to the same question; from the run's engine only if its version is the rollout's
        first version."""
        assert self.judge is not None, "the section was checked"
        if self.judge.is_own_engine:
            current = attempt is not None and attempt.policy_version == self._own_version
            return self._own.get(key) if current else None
        if self._cache is None:
            return None
        try:
            row = orjson.loads(await asyncio.to_thread(self._cache.read, key))
        except NotFound:
            return None
        return Answer(row["answer"], row["prompt_tokens"], row["completion_tokens"])

    async def _keep(self, key: str, answer: Answer, criterion: Criterion) -> None:
        assert self.judge is not None, "the section was checked"
        if answer.policy_version is not None and answer.policy_version >= self._own_version and not answer.mixed:
            if answer.policy_version > self._own_version:
                self._own, self._own_version = {}, answer.policy_version
            self._own.setdefault(key, answer)
        if self._cache is None or self.judge.is_own_engine:
            return
        row = {
            "answer": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "model": self.judge.model,
            "question": criterion.question,
            "created": time.time(),
        }
        with contextlib.suppress(AlreadyExists):  # another rollout asked the same at the same time
            await asyncio.to_thread(self._cache.create, key, orjson.dumps(row))

    async def _asked(
        self, messages: list[dict[str, Any]], rollout: Rollout, attempt: RolloutAttempt | None, seed: int
    ) -> Answer:
        """One call, counted whatever came of it."""
        assert self.judge is not None, "the section was checked"
        self._count(rollout, {CALLS: 1})
        async with self._gate:
            answer = await (
                self._own_answer(messages, attempt, seed)
                if self.judge.is_own_engine
                else self.asked_elsewhere(messages)
            )
        self._count(rollout, {PROMPT_TOKENS: answer.prompt_tokens, COMPLETION_TOKENS: answer.completion_tokens})
        self._note_version(rollout, answer)
        return answer

    def _count(self, rollout: Rollout, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            own = f"{self._prefix}_{name}"
            rollout.metrics[own] = rollout.metrics.get(own, 0.0) + count

    def _note_version(self, rollout: Rollout, answer: Answer) -> None:
        if answer.policy_version is not None:
            own = f"{self._prefix}_{VERSION}"
            rollout.metrics[own] = float(min(rollout.metrics.get(own, math.inf), answer.policy_version))

    async def _own_answer(self, messages: list[dict[str, Any]], attempt: RolloutAttempt | None, seed: int) -> Answer:
        """Ask the run's engine outside the rollout: the tokens are not a turn.

        Raises:
            JudgeRefused: the question does not fit the model's context or is refused for another reason.
            InfraError: the engine failed, as in the rollout's calls.
        """
        assert self.judge is not None, "the section was checked"
        assert attempt is not None, "judges without an engine need base_url"
        assert attempt.engine is not None, "the rollout engine sets it"
        sampling = attempt.sampling.model_copy(update={"max_new_tokens": self.judge.max_tokens})
        try:
            completion = await attempt.engine.complete(messages, [], sampling, seed)
        except EngineRejected as error:
            raise JudgeRefused(
                f"The run's own engine refuses the judge's question: {error} It holds the whole conversation; raise "
                "generation.max_model_len, lower rollout.max_tokens, or name another judge (rubric.judge.base_url)."
            ) from error
        tokens = len(completion.prompt_token_ids), len(completion.generation_token_ids)
        mixed = completion.version_spans is not None
        return Answer(completion.message.get("content") or "", *tokens, completion.policy_version, mixed)

    async def asked_elsewhere(self, messages: list[dict[str, Any]]) -> Answer:
        """Ask the service or the endpoint.

        Raises:
            JudgeFailed, JudgeQuota, JudgeRefused, JudgeUnreadable
        """
        assert self.judge is not None, "the section was checked"
        if self._service is None:
            return await self.post(messages)
        place = f"{self.key}.judge.service {self.judge.service}"
        try:
            async with asyncio.timeout(self.judge.timeout_seconds):
                answer: Any = await self._service.ask(messages)
        except (InfraError, DataError):
            raise
        except TimeoutError as error:
            limit = f"{self.key}.judge.timeout_seconds={self.judge.timeout_seconds:g}"
            raise JudgeFailed(f"{place} did not answer within {limit}.") from error
        except OSError as error:
            raise JudgeFailed(f"{place} failed: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise JudgeRefused(f"{place} raised {describe_error(error)}.") from error
        if not isinstance(answer, Answer):
            raise JudgeUnreadable(
                f"{place} returned a {type(answer).__name__}, not a roundhouse.rollout.rubric.Answer."
            )
        return answer

    async def post(self, messages: list[dict[str, Any]]) -> Answer:
        """Ask the endpoint.

        Raises:
            JudgeFailed, JudgeQuota, JudgeRefused, JudgeUnreadable
        """
        judge = self.judge
        assert judge is not None, "the section was checked"
        assert judge.base_url is not None, "the run's own engine has another way"
        if self._session is None:
            self._session = client_session(self._headers)
        url = f"{judge.base_url.rstrip('/')}/chat/completions"
        body = {
            "model": judge.model,
            "messages": messages,
            "temperature": judge.temperature or 0,
            "max_tokens": judge.max_tokens,
        }
        try:
            limit = aiohttp.ClientTimeout(total=judge.timeout_seconds)
            async with self._session.post(url, data=orjson.dumps(body), timeout=limit, allow_redirects=False) as reply:
                status, data = reply.status, await read_reply(reply)
        except TimeoutError as error:
            raise JudgeFailed(
                f"{url} did not answer within {self.key}.judge.timeout_seconds={judge.timeout_seconds:g}."
            ) from error
        except aiohttp.ClientError as error:
            raise JudgeFailed(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        if status != 200:
            raise error_of(status, data, url)
        return read_answer(data, url)


def error_of(status: int, data: bytes, url: str) -> InfraError | DataError:
    """The typed error of a reply that is not 200."""
    text = f"{url} answered {status}: {data[:500].decode(errors='replace')}"
    if status == 402 or (status in (403, 429) and b"quota" in data.lower()):
        return JudgeQuota(text)
    return JudgeFailed(text) if status >= 500 or status in PASSING else JudgeRefused(text)


def read_answer(data: bytes, url: str) -> Answer:
    """Return the JSON of a chat completion's text.

    Raises:
        JudgeUnreadable: the reply is not a chat completion with a text.
    """
    try:
        reply = read_json(data)
        text, usage = reply["choices"][0]["message"]["content"], reply.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError(f"content is {text!r}")
        return Answer(text, _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens"))
    except MALFORMED as error:
        begins = data[:200].decode(errors="replace")
        raise JudgeUnreadable(
            f"{url} answered 200 with no text ({type(error).__name__}: {error}): {begins!r}."
        ) from error


def _tokens(usage: dict[str, Any], name: str) -> int:
    """Return a count of tokens; 0 if the judge does not report it."""
    count = usage.get(name)
    if count is None:
        return 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= LARGEST:
        raise ValueError(f"usage.{name} is {shown(count)}, not a number of tokens")
    return count


def read_verdict(text: str, criterion: Criterion) -> float:
    """Return the score from 0 to 1 of the last verdict in a judge's answer.

    Raises:
        JudgeUnreadable: a verdict is missing or has the wrong form.
    """
    verdicts = _VERDICT.findall(text)
    last = verdicts[-1].lower() if verdicts else ""
    if criterion.scale is None:
        if last in ("yes", "no"):
            return float(last == "yes")
    elif last and last not in ("yes", "no"):
        low, high = criterion.scale
        if low <= float(last) <= high:
            return (float(last) - low) / (high - low)
    raise JudgeUnreadable(
        f"The judge's answer to {criterion.question!r} ends without the verdict that was asked for ({_form(criterion)}): "
        f"{text[-300:]!r}. Raise judge.max_tokens if it was cut short."
    )


def _form(criterion: Criterion) -> str:
    return YES_OR_NO if criterion.scale is None else SCORE.format(*criterion.scale)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Auditor(RubricJudge):
    """Judges rewarded rollouts a second time."""

    section: Audit

    async def look_again(self, rollout: Rollout, retry: RetryPolicy, attempt: RolloutAttempt | None = None) -> None:
        """Write into the metrics of a rewarded rollout whether the audit agrees; arguments as of `score`."""
        audit = self.section
        drawn = derive_seed(rollout.seed, "audit") / SEEDS < audit.share
        if not drawn or rollout.reward is None or rollout.reward < audit.reward_at_least:
            return
        try:
            score = math.fsum((await self._parts(rollout, retry, attempt)).values())
        except (InfraError, DataError) as error:
            log.warning("%s gave no verdict on %s: %s", self.key, rollout.rollout_id, error)
            rollout.metrics["audit_failed"] = 1.0
        else:
            rollout.metrics["audit_agrees"] = float(score >= audit.agrees_at)


class JudgedAgent:
    """Plays as the environment's own agent does, then has the rollout scored, and looks again at those to be trained on."""

    def __init__(self, agent: Agent, judge: RubricJudge | None, audit: Auditor | None) -> None:
        self._agent, self.judge, self._audit = agent, judge, audit

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        await self._agent.play(attempt, environment)
        rollout, retry = attempt.rollout, attempt.config.retry
        if rollout.status is Status.MASKED:
            return
        if self.judge is not None:
            await attempt.in_environment(self.judge.score(rollout, retry, attempt))
            if attempt.answer is not None:
                attempt.answer = {**attempt.answer, "reward": rollout.reward}
        if self._audit is not None and attempt.on_policy:
            await attempt.in_environment(self._audit.look_again(rollout, retry, attempt))


class JudgedEnvironment(ClosedOnExit):
    """An environment with a rubric that scores or audits its rollouts."""

    def __init__(
        self, environment: EnvironmentClient, rubric: Rubric | None, audit: Audit | None, store: str | None
    ) -> None:
        """Create the judge over an environment. `RubricJudge` documents `store` and the errors."""
        judge = None if rubric is None else RubricJudge(rubric, store)
        second = None if audit is None else Auditor(audit, store)
        self._environment, self._judges = environment, [each for each in (judge, second) if each is not None]
        self.agent = JudgedAgent(environment.agent, judge, second)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def __aenter__(self) -> Any:
        async with asyncio.TaskGroup() as group:
            for judge in self._judges:
                group.create_task(judge.begin())
            await self._environment.__aenter__()
        return self

    async def close(self) -> None:
        for judge in self._judges:
            await judge.close()
        await self._environment.close()


def refuse_unfit_criteria(section: Criteria, key: str, *, ask: bool) -> None:
    """Reject a rubric or audit that cannot be used. With `ask`, also test its endpoint with a simple question.

    Args:
        key: configuration key of the section.

    Raises:
        ConfigError: the test gives no verdict, or the section cannot be used.
    """
    judge = RubricJudge(section)
    if not ask or section.judge is None or section.judge.is_own_engine:
        return
    criterion = Criterion(question="Is the conversation empty?")

    async def exchange() -> None:
        try:
            read_verdict(
                (await judge.asked_elsewhere(judge._messages(criterion, '{"conversation": []}'))).text, criterion
            )
        finally:
            await judge.close()

    try:
        run_interruptible(exchange())
    except (InfraError, DataError) as error:
        service, url = section.judge.service, section.judge.base_url
        place = f"base_url is {url}" if service is None else f"service is {service}"
        remedy = (
            "Correct the URL, the model or the key, or give it quota." if service is None else "Correct the service."
        )
        raise ConfigError(
            f"{key}.judge.{place}, which does not judge as {section.judge.model}: {error} {remedy}"
        ) from error
