"""FakeTinker: a server on loopback that speaks the REST API of Tinker as its public SDK calls it, on a small real model.

It computes the losses in plain loops over sequences, by their published formulas, with torch's AdamW; the whole model is
trained where Tinker would train an adapter. Nothing of roundhouse is used, so agreement with it is evidence.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from tinker.proto import tinker_public_pb2 as wire
from transformers import AutoModelForCausalLM


class FakeTinker:
    """One model; `app` serves it."""

    def __init__(self, model: Path, api_key: str) -> None:
        self.directory, self.api_key = model, api_key
        self.model: Any = None
        self.optimizer: Any = None
        self.saved: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.answers: dict[str, Response] = {}
        self.snapshots: dict[str, Any] = {}
        self.losses: list[str] = []
        self.sequence: list[int] = []
        self.numbers = itertools.count()

    @property
    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/api/v1/{verb:path}")
        async def post(verb: str, request: Request) -> Response:
            body = await request.body()
            if request.headers.get("x-api-key") != self.api_key:
                return JSONResponse({"detail": "wrong key"}, 401)
            if verb == "forward_backward":
                message = wire.ForwardBackwardRequest.FromString(body)
                return self._later(lambda: self._forward_backward(message))
            return self._answer(verb, await request.json() if body else {})

        return app

    def _answer(self, verb: str, body: dict[str, Any]) -> Response:
        if verb == "retrieve_future":
            return self.answers[body["request_id"]]
        plain: dict[str, dict[str, Any]] = {
            "client/config": {"use_pyqwest_transport": False},
            "client/dynamic_config": {},
            "create_session": {"type": "create_session", "session_id": "s"},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
            "get_info": {"model_id": "s:train:0", "model_data": {"model_name": "tiny"}, "is_lora": True},
        }
        if verb in plain:
            return JSONResponse(plain[verb])
        later: dict[str, Callable[[dict[str, Any]], Response]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "save_weights_for_sampler": self._snapshot,
            "asample": self._sample,
            "save_weights": self._save,
            "optim_step": self._optim_step,
        }
        if verb in later:
            return self._later(lambda: later[verb](body))
        return JSONResponse({})

    def _later(self, work: Callable[[], Response]) -> Response:
        request_id = f"future-{next(self.numbers)}"
        try:
            self.answers[request_id] = work()
        except ValueError as error:
            self.answers[request_id] = JSONResponse({"error": str(error), "category": "user"})
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": [request_id]})

    def _create(self, body: dict[str, Any]) -> Response:
        if body["base_model"] != "tiny":
            raise ValueError(f"no base model {body['base_model']}")
        self._fresh()
        return JSONResponse({"type": "create_model", "model_id": "s:train:0"})

    def _fresh(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.directory, attn_implementation="eager").eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _load(self, body: dict[str, Any]) -> Response:
        weights, optimizer = self.saved[body["path"]]
        self._fresh()
        self.model.load_state_dict(weights)
        if body["optimizer"]:
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        return JSONResponse({"type": "load_weights", "path": body["path"]})

    def _save(self, body: dict[str, Any]) -> Response:
        path = f"tinker://s:train:0/weights/{body['path']}"
        state = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        self.saved[path] = state
        return JSONResponse({"type": "save_weights", "path": path})

    def _snapshot(self, body: dict[str, Any]) -> Response:
        session = f"sampler-{len(self.snapshots)}"
        self.snapshots[session] = copy.deepcopy(self.model)
        return JSONResponse({"type": "save_weights_for_sampler", "sampling_session_id": session})

    @torch.inference_mode()
    def _sample(self, body: dict[str, Any]) -> Response:
        """Token by token over the whole sequence, with a generator of the request's seed."""
        model, params = self.snapshots[body["sampling_session_id"]], body["sampling_params"]
        ids = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        prompt, log_probs, temperature = len(ids), [], params["temperature"]
        generator = torch.Generator().manual_seed(params.get("seed", 0))
        while len(log_probs) < params["max_tokens"] and (not log_probs or ids[-1] not in (params.get("stop") or [])):
            every = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float() / (temperature or 1), -1)
            ids.append(int(torch.multinomial(every.exp(), 1, generator=generator) if temperature else every.argmax()))
            log_probs.append(float(every[ids[-1]]))
        answer = wire.SampleResponse()
        stopped = ids[-1] in (params.get("stop") or [])
        answer.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
            tokens=np.array(ids[prompt:], np.int32).tobytes(),
            logprobs=np.array(log_probs, np.float32).tobytes(),
        )
        if body.get("prompt_logprobs"):
            scored = torch.log_softmax(model(torch.tensor([ids[:prompt]])).logits[0, :-1].float(), -1)
            chosen = scored.gather(1, torch.tensor(ids[1:prompt])[:, None])[:, 0]
            answer.prompt_logprobs = np.array([np.nan, *chosen.tolist()], np.float32).tobytes()
        return Response(answer.SerializeToString(), media_type="application/x-protobuf")

    def _optim_step(self, body: dict[str, Any]) -> Response:
        params = body["adam_params"]
        for group in self.optimizer.param_groups:
            group |= {"lr": params["learning_rate"], "betas": (params["beta1"], params["beta2"]), "eps": params["eps"]}
            group["weight_decay"] = params["weight_decay"]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), params["grad_clip_norm"] or 1e30)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sequence.append(body["seq_id"])
        return JSONResponse({"metrics": {"unclipped_grad_l2:mean": float(norm)}})

    def _forward_backward(self, request: Any) -> Response:
        output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        config = {name: value.number for name, value in request.loss_fn_config_v2.items()}
        self.sequence.append(request.seq_id)
        if not request.forward_only:
            self.losses.append(request.loss_fn)
        found = [self._datum(request, datum, config) for datum in request.data]
        batched = output.loss_fn_outputs.add(num_datums=len(found)).fields["logprobs"]
        batched.dtype, batched.data = wire.DTYPE_FLOAT32, b"".join(values.tobytes() for values in found)
        batched.offsets = np.cumsum([0, *(values.nbytes for values in found)], dtype=np.int64).tobytes()
        return Response(output.SerializeToString(), media_type="application/x-protobuf")

    def _datum(self, request: Any, datum: Any, config: dict[str, float]) -> np.ndarray:
        """Log-probabilities of the targets; the gradient is added unless only the forward pass was asked for."""
        ids = [i for chunk in datum.model_input for i in np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()]
        given = {name: _tensor(value) for name, value in datum.loss_fn_inputs.items()}
        every = torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)
        cur = every.gather(1, given["target_tokens"][:, None])[:, 0]
        if not request.forward_only:
            _loss(request.loss_fn, cur, given, config).backward()
        return cur.detach().numpy()


def _tensor(value: Any) -> torch.Tensor:
    kind = np.int64 if value.dtype == wire.DTYPE_INT64 else np.float32
    return torch.from_numpy(np.frombuffer(value.dense, kind).copy())


def _loss(name: str, cur: torch.Tensor, given: dict[str, torch.Tensor], config: dict[str, float]) -> torch.Tensor:
    if name == "cross_entropy":
        return -(given["weights"] * cur).sum()
    ratio, advantages = torch.exp(cur - given["logprobs"]), given["advantages"]
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    clamped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    if name == "cispo":
        return -(clamped.detach() * advantages * cur).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantages, clamped * advantages).sum()
    raise ValueError(f"unknown loss {name}")
