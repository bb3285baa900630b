"""Draw rollouts at a server of SGLang by its routes: `generation.endpoint.kind: sglang`.

Invariant: the engine sends only token IDs, and takes only token IDs with log-probabilities, each answer from the
weights that it set. SGLang puts its `weight_version` into every answer; a different version fails the call and those
after it, until the weights are loaded again.

    POST /generate                    input_ids, sampling_params, return_logprob
                                      ──> meta_info: output_token_logprobs [[log-prob, id, null], …], weight_version
    POST /update_weights_from_disk    model_path, weight_version, flush_cache   ──> success
    GET  /get_model_info                                                       ──> model_path, weight_version

The proof of a load is weaker than the proof of our own replicas: `weight_version` is a label that the server sets when
the load succeeds; it is not computed from the weights. The train stage compares log-probabilities and so proves the
weights (`validation.recompute_tolerance`), which is why that cannot be switched off. A refit needs no
/pause_generation: requests are drained before it, and the server lets other clients' requests end first.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.openai_engine import OpenAIEngine, checked_tokens, reading
from roundhouse.generation.protocol import (
    ALL_TOKENS,
    NEUTRAL_SAMPLING,
    BadReply,
    Draw,
    EnginePoisoned,
    EngineUnreachable,
    Generated,
    WeightsLost,
)
from roundhouse.trajectories.records import SEEDS

logger = logging.getLogger(__name__)

GENERATE = "/generate"

_NEUTRAL = {{"min_tokens": "min_new_tokens"}.get(name, name): value for name, value in NEUTRAL_SAMPLING.items()}


class SGLangEngine(OpenAIEngine):
    """`Engine` over SGLang's server."""

    @classmethod
    def trial(cls, model: str) -> tuple[str, dict[str, Any]]:
        body = {"input_ids": [0, 1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        return GENERATE, body

    @classmethod
    def read_trial(cls, reply: Any) -> tuple[list[int], list[float]]:
        return read_tokens(reply["meta_info"])

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        super().__init__(config, codec)
        self._label: str | None = None
        """`weight_version` that answers must have; None: nothing is held yet."""

    async def start(self) -> None:
        """Start as `OpenAIEngine.start` does."""
        await super().start()
        logger.warning(
            "%s names the weights that it holds, and does not prove that it computes with them (generation.endpoint.kind: "
            "sglang): validation.recompute_tolerance compares its log-probabilities with the trainer's.",
            self._endpoint.url,
        )

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `OpenAIEngine.generate`.

        Raises:
            WeightsLost: the server holds other weights than it was given: it was started again, or others load there.
        """
        sampling = {
            "max_new_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or ALL_TOKENS,
            **_NEUTRAL,
            "stop_token_ids": self._stops,
        }
        if draw.seed is not None:
            sampling["sampling_seed"] = draw.seed % SEEDS
        with reading(self._endpoint.url, GENERATE):
            meta = await self._meta({"input_ids": list(prompt_token_ids), "sampling_params": sampling})
            return self._generated(*read_tokens(meta))

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """See `OpenAIEngine.load_weights`; `running` is drain, and nothing is kept of the cache."""
        if self._keeps_weights(version):
            self._label = (await self._info())[1]
            return
        label = f"roundhouse-{version}-{uuid.uuid4().hex[:12]}"
        load = {"model_path": directory, "weight_version": label, "flush_cache": True}
        try:
            reply = await self._call("POST", "/update_weights_from_disk", load, seconds=self._refit_seconds)
            with reading(self._endpoint.url, "/update_weights_from_disk"):
                success = reply["success"]
            loaded = await self._info()
        except (EngineUnreachable, BadReply) as error:
            raise EnginePoisoned(
                f"The server did not load {directory}: {error} It needs to see the directory at the same path."
            ) from error
        self._label = label
        if success is not True or loaded != (directory, label):
            raise EnginePoisoned(
                f"{self._endpoint.url} should hold {directory} as {label}, but answers {reply} and {loaded}."
            )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = list(token_ids)
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        with reading(self._endpoint.url, GENERATE):
            meta = await self._meta({"input_ids": ids, "sampling_params": sampling, "logprob_start_len": 0})
            scored = (meta.get("input_token_logprobs") or [])[1:]  # the first token is not predicted
            if [entry[1] for entry in scored] != ids[1:]:
                raise BadReply(f"It returned {len(scored)} log-probabilities of a prompt of {len(ids)} tokens.")
            values = [entry[0] for entry in scored]
            return self._generated(*checked_tokens(ids[1:], values)).log_probs if values else []

    async def _info(self) -> tuple[Any, str | None]:
        """Return the path and the label of the weights that the server holds."""
        info = await self._call("GET", "/get_model_info")
        with reading(self._endpoint.url, "/get_model_info"):
            path, label = info.get("model_path"), info.get("weight_version")
        return path, None if label is None else str(label)

    async def _meta(self, body: dict[str, Any]) -> dict[str, Any]:
        """`meta_info` of an answer by the weights that are held."""
        reply = await self._call("POST", GENERATE, body | {"return_logprob": True})
        with reading(self._endpoint.url, GENERATE):
            meta: dict[str, Any] = reply["meta_info"]
            label = meta.get("weight_version")
        if self._label is not None and label != self._label:
            raise WeightsLost(
                f"{self._endpoint.url} answers by the weights {label!r}, and was given {self._label!r}: it was started again, "
                "or something else loads weights there."
            )
        return meta


def read_tokens(meta: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return token IDs and log-probabilities of an answer's `meta_info`.

    Raises:
        BadReply: they are missing, or not numbers of these kinds.
        EngineUnreachable: the server aborted the request.
        AttributeError, LookupError, TypeError: the entries have another shape.
    """
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise EngineUnreachable(f"The server aborted the request: {meta['finish_reason']}")
    entries = meta.get("output_token_logprobs") or []
    if not entries or any(entry[0] is None for entry in entries):
        raise BadReply(f"It returned {len(entries)} token IDs with log-probabilities.")
    return checked_tokens([entry[1] for entry in entries], [entry[0] for entry in entries])
