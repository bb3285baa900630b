"""Check of a foreign endpoint's answers before a run."""

from __future__ import annotations

from roundhouse import plugins
from roundhouse.config.generation import Endpoint, training_endpoints, weight_updates
from roundhouse.config.models import RunConfig
from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.http.clients import http_client, proxy_note

ANSWER_SECONDS = 10.0


def refuse_unfit_endpoint(config: RunConfig, remote: bool, trains: bool) -> None:
    """Refuse a running server that does not take weights that change, or does not list its models. Its token replies
    are checked when the engine starts."""
    endpoint = config.generation.endpoint
    if endpoint is None:
        return
    if trains and endpoint.kind == "text" and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.kind is text, so {endpoint.url} returns neither token IDs nor log-probabilities: evaluations "
            "and collections work with --version 0, training does not. Name a server that returns them, and set kind "
            f"to {' or '.join(training_endpoints())}."
        )
    if trains and endpoint.weight_update is None and config.offline is None:
        raise ConfigError(
            f"generation.endpoint.weight_update is unset, so {endpoint.url} keeps the weights that it has: evaluations and "
            f"collections work with --version 0, training does not. Set it to {' or '.join(weight_updates())}, if the server "
            "can read a checkpoint's directory."
        )
    if not remote:
        return
    import httpx

    secret = None if endpoint.api_key_variable is None else read_secret(endpoint.api_key_variable)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        with http_client(endpoint.url, foreign=True, headers=headers, timeout=ANSWER_SECONDS) as http:
            status = http.get(f"{endpoint.url}/v1/models").status_code
        problem = None if status == 200 else f"answered {status}"
    except httpx.HTTPError as error:
        problem = f"does not answer ({type(error).__name__}: {error})"
    if problem is not None:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, and its /v1/models {problem}. Start the server, or correct the "
            f"section generation.endpoint.{proxy_note(endpoint.url)}"
        )
    if endpoint.kind != "text":
        try:
            _refuse_no_tokens(endpoint, headers, config.generation.request_timeout_seconds)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"generation.endpoint.url is {endpoint.url}, which does not draw a token within "
                f"generation.request_timeout_seconds ({type(error).__name__}: {error}). Start the server again, or raise it."
            ) from error


def _refuse_no_tokens(endpoint: Endpoint, headers: dict[str, str], seconds: float) -> None:
    """Draw one token as the engine will, and see that it comes with its ID and log-probability.

    Raises:
        ConfigError: it does not.
        httpx.HTTPError: the server does not answer within `seconds`.
    """

    from roundhouse.generation import openai_engine
    from roundhouse.generation.protocol import BadReply, EngineUnreachable
    from roundhouse.http.replies import MALFORMED

    engine: type[openai_engine.OpenAIEngine] = plugins.factory("endpoint", endpoint.kind)
    path, body = engine.trial(endpoint.model)
    with http_client(endpoint.url, foreign=True, headers=headers, timeout=seconds) as http:
        reply = http.post(endpoint.url + path, json=body)
    try:
        engine.read_trial(reply.json())
    except (BadReply, EngineUnreachable, *MALFORMED) as error:
        raise ConfigError(
            f"generation.endpoint.url is {endpoint.url}, and its {path} answers {reply.status_code} without token IDs and "
            f"log-probabilities ({reply.text[:200]!r}), which generation.endpoint.kind {endpoint.kind} needs: its answers "
            f"cannot be trained on. {openai_engine.REMEDY}"
        ) from error
