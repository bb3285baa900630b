"""A real exchange with an engine before a run relies on it: models, chat, tokenize, recorded tokens, tool calls.

Invariant: every check uses the engine's routes for rollouts and changes nothing in it. A failed check is a `Problem`
with symptom, likely cause and remedy, the same at a run's start (`refuse_unfit_engine`) and in `roundhouse doctor`.

    GET  /v1/models              names the requested model
    POST /v1/chat/completions    answers with token IDs and log-probabilities, the run's sampling and tools given
    POST /tokenize               returns the chat's prompt; continued, a prompt that begins with the recorded tokens
    POST /rh/parsed              the tool-call parser reads a call that the chat template writes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import httpx

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.generation.client import PATH, error_of, read_completion, request_body
from roundhouse.generation.protocol import Completion, ContextOverflow, EngineTimeout, EngineUnreachable
from roundhouse.http.clients import http_client
from roundhouse.http.replies import MALFORMED
from roundhouse.trajectories.storable import call_problem, shown

TOKENS = 4
"""Generated for the exchange."""
MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Problem:
    """A difference between an engine's behaviour and a run's requirement."""

    symptom: str
    cause: str
    remedy: str
    passing: bool = False
    """It may pass by itself: the engine is not there yet, or busy."""

    def __str__(self) -> str:
        cause = self.cause.rstrip(".")
        return f"{self.symptom}: {cause}. {self.remedy}"


def refuse_unfit_engine(
    url: str, config: GenerationConfig, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """Refuse an engine that a run's rollouts could not use.

    Args:
        messages: initial messages of a task's rollout, in chat form.
        tools: tools of the task, in chat form; empty without tools.

    Raises:
        EngineUnreachable: it does not answer.
        ConfigError: names the key and the remedy.
    """
    if problem := problem_of(url, config, messages, tools):
        raise (EngineUnreachable if problem.passing else ConfigError)(str(problem))


def problem_of(
    url: str, config: GenerationConfig, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> Problem | None:
    """Return the first failed check; None if all pass."""
    with http_client(url, timeout=config.request_timeout_seconds) as client:
        try:
            return _exchange(client, url, config, messages, tools)
        except httpx.TimeoutException as error:
            wait = f"no answer within generation.request_timeout_seconds ({config.request_timeout_seconds:g} s)"
            return Problem(f"{url}: {wait}", f"{type(error).__name__}: a busy engine", "Raise it.", passing=True)
        except httpx.HTTPError as error:
            return Problem(
                f"{url}: no connection ({error})",
                "no HTTP server listens there",
                "Start the engine, or correct generation.engine_url; unset, a run starts its own.",
                passing=True,
            )
        except MALFORMED as error:
            return Problem(
                f"{url}: a reply of another shape ({type(error).__name__}: {shown(error)})",
                "another server answers there",
                "Correct generation.engine_url: an engine of Roundhouse serves the model as policy.",
            )


def _exchange(
    client: httpx.Client,
    url: str,
    config: GenerationConfig,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> Problem | None:
    reply = client.get("/v1/models")
    try:
        served = [each["id"] for each in reply.json()["data"]] if reply.status_code == 200 else []
    except MALFORMED:
        served = []
    if MODEL not in served:
        summary = f"HTTP {reply.status_code}" if reply.status_code != 200 else f"models {served}"
        return Problem(
            f"{url}/v1/models: {summary}, not {MODEL!r}",
            "another server answers there",
            "Correct generation.engine_url: an engine of Roundhouse serves the model as policy.",
        )
    sampling = config.sampling.model_copy(update={"max_new_tokens": min(TOKENS, config.sampling.max_new_tokens)})
    body = request_body(messages, tools, sampling, 1, MODEL)
    reply = client.post(PATH, json=body)
    if reply.status_code != 200:
        return _refused(error_of(reply.status_code, reply.content, url + PATH))
    try:
        answer = read_completion(reply.content, 0.0, url + PATH)
    except RoundhouseError as error:
        return _refused(error)
    text_alone = (
        config.endpoint is not None and config.endpoint.kind == "text"
    )  # reports this, and is not used for training
    drawn, log_probs = len(answer.generation_token_ids), answer.generation_log_probs
    if not text_alone and not (len(log_probs) == drawn and math.isfinite(sum(log_probs))):
        return Problem(
            f"{drawn} generated tokens with log-probabilities {log_probs}",
            "the engine does not measure the log-probability of each token that it draws",
            "Take an engine that does; training needs them.",
        )
    return _tokens_kept(client, url, body, answer) or (_calls_read(client, url, config, tools[0]) if tools else None)


def _refused(error: Exception) -> Problem:
    if isinstance(error, ContextOverflow):
        return Problem(
            "the environment's first task does not fit the context, its tools included",
            str(error).partition(" Shorten the conversation")[0],
            "Raise generation.max_model_len.",
        )
    return Problem(
        "the engine does not answer a chat completion as a run needs it",
        str(error),
        "Correct what the answer names, or generation.engine_url.",
        passing=isinstance(error, EngineUnreachable | EngineTimeout),
    )


def _tokens_kept(client: httpx.Client, url: str, body: dict[str, Any], answer: Completion) -> Problem | None:
    """Return whether tokens survive the round trip: the prompt by /tokenize, and the answer at the beginning of the
    next prompt."""
    request: dict[str, Any] = {name: body[name] for name in ("model", "messages", "tools") if name in body}
    prompt = _tokenized(client, request)
    recorded = [*answer.prompt_token_ids, *answer.generation_token_ids]
    if prompt is not None and prompt != answer.prompt_token_ids:
        return _drift(f"{url}/tokenize gives {prompt[:16]}, the chat saw {answer.prompt_token_ids[:16]}")
    reply_message = {
        **answer.message,
        "prompt_token_ids": answer.prompt_token_ids,
        "generation_token_ids": answer.generation_token_ids,
        "generation_log_probs": answer.generation_log_probs,
    }
    more = [*body["messages"], reply_message, {"role": "user", "content": "Another."}]
    following = None if prompt is None else _tokenized(client, request | {"messages": more})
    if following is not None and following[: len(recorded)] != recorded:
        return _drift(f"the prompt that follows begins with {following[: len(recorded)]}, not with {recorded}")
    return None


def _drift(what: str) -> Problem:
    return Problem(
        f"tokens do not make the round trip: {what}",
        "the conversation is tokenized again on its way (LF3), or a server between drops the token fields of messages",
        "Let generation.engine_url be the engine itself, with the policy's own tokenizer.",
    )


def _tokenized(client: httpx.Client, body: dict[str, Any]) -> list[int] | None:
    """Return the prompt's tokens; None if the engine lacks the route, which rollouts do not need."""
    reply = client.post("/tokenize", json=body)
    if reply.status_code != 200:
        return None
    tokens: list[int] = reply.json()["tokens"]
    if problem := call_problem(tokens, [], [], 0):
        raise ValueError(problem)
    return tokens


def _calls_read(client: httpx.Client, url: str, config: GenerationConfig, tool: dict[str, Any]) -> Problem | None:
    """Return whether the parser reads a call that the chat template writes. A template without calls proves nothing."""
    name = tool["function"]["name"]
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": '{"probe": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = client.post("/rh/parsed", json={"message": message, "tools": [tool]})
    if reply.status_code != 200:
        return None
    written, read = reply.json()["text"], reply.json()["message"].get("tool_calls") or []
    if name not in written or any(each["function"]["name"] == name for each in read):
        return None
    return Problem(
        f"tool calls are not parsed: the chat template writes {written.strip()!r}, and {url} reads it as text",
        f"generation.tool_call_parser is {config.tool_call_parser}, the parser of another model",
        "Set generation.tool_call_parser to the one for the policy's chat template (vLLM's names).",
    )
