"""Stand-ins of servers that somebody else runs and that cannot be had here, over a real model.

`PlainServer`: an OpenAI-compatible server that knows no token IDs and no log-probabilities.

`FakeSGLang`: SGLang's routes as its `http_server.py`, `io_struct.py` and `tokenizer_manager.py` (0.5) have them: an answer's
`meta_info` has `output_token_logprobs` and `input_token_logprobs` as [log-prob, id, null], the first of the prompt without a
value, and `weight_version`; an update that fails answers 400 with `success` false.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from transformers import AutoModelForCausalLM, AutoTokenizer


class PlainServer:
    """Answers every prompt with one of `texts`, in turn."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.requests = texts, list[dict[str, Any]]()
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "served"}]})
        self.app.post("/v1/completions")(self._complete)

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        return {"choices": [{"text": text, "finish_reason": "stop"}]}


class FakeSGLang:
    """The server. `obeys` False: it claims to have loaded weights but computes with the old ones."""

    def __init__(self, model: Path, *, obeys: bool = True) -> None:
        self.obeys, self.requests = obeys, list[tuple[str, dict[str, Any]]]()
        self.path, self.version = str(model), "default"
        self._one_at_a_time = asyncio.Lock()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._ends = {AutoTokenizer.from_pretrained(model).eos_token_id}
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "served", "max_model_len": 512}]})
        self.app.get("/get_model_info")(lambda: {"model_path": self.path, "weight_version": self.version})
        self.app.post("/generate")(self._generate)
        self.app.post("/update_weights_from_disk")(self._update)

    async def _update(self, body: dict[str, Any]) -> JSONResponse:
        self.requests.append(("update", body))
        try:
            found = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32)
        except (OSError, ValueError) as error:
            text = f"Failed to get weights iterator: {error}."
            return JSONResponse({"success": False, "message": text, "num_paused_requests": 0}, 400)
        self._model = found if self.obeys else self._model
        self.path, self.version = body["model_path"], body.get("weight_version") or self.version
        return JSONResponse({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(("generate", body))
        assert body["return_logprob"]
        params, prompt = body["sampling_params"], list(body["input_ids"])
        async with self._one_at_a_time:
            drawn, ids = self._draw(prompt, params)
        reason = "stop" if ids and ids[-1] in self._stops(params) else "length"
        meta: dict[str, Any] = {
            "finish_reason": {"type": reason},
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "output_token_logprobs": [[value, token, None] for value, token in zip(drawn, ids, strict=True)],
            "input_token_logprobs": [],
        }
        if body.get("logprob_start_len", -1) == 0:
            log_probs = self._log_probs(prompt)[range(len(prompt) - 1), prompt[1:]].tolist()
            values = [None, *log_probs]
            meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(values, prompt, strict=True)]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _draw(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[float], list[int]]:
        random = torch.Generator().manual_seed(params.get("sampling_seed", 0))
        log_probs: list[float] = []
        ids: list[int] = []
        while len(ids) < params["max_new_tokens"] and not (ids and ids[-1] in self._stops(params)):
            row = self._log_probs([*prompt, *ids])[-1]
            greedy = params.get("temperature", 1.0) == 0
            token = int(row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=random))
            ids.append(token)
            log_probs.append(float(row[token]))
        return log_probs, ids

    def _stops(self, params: dict[str, Any]) -> set[int]:
        return self._ends | set(params.get("stop_token_ids") or ())

    @torch.no_grad()
    def _log_probs(self, ids: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
