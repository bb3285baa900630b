"""Plain Hugging Face transformers behind the `Engine` protocol: slow, simple, and a second opinion on vLLM.

Invariant: requests that wait together are answered in one left-padded batch, and a row's tokens and log-probabilities are those
it would have alone, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from roundhouse.config.models import GenerationConfig
from roundhouse.generation import weights
from roundhouse.generation.engine import AsgiApp, Draw, EnginePoisoned, Generated

if TYPE_CHECKING:
    import torch

    from roundhouse.generation.chat import ChatCodec

BATCH = 64
"""Requests answered together at most; `engine_args: {max_num_seqs: 1}` answers each alone, bit for bit the same each time."""


class TransformersEngine:
    """`Engine` over `AutoModelForCausalLM`, in a thread of its own."""

    def __init__(self, config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> None:
        from roundhouse.generation.openai_routes import OpenAIRoutes

        self.config = config
        self.max_model_len = config.max_model_len
        self._batch = int(config.engine_args.get("max_num_seqs", BATCH))
        self._model_dir = model_dir
        self._codec = codec
        self._app = OpenAIRoutes(codec, served_name)
        self._model: Any = None
        self._waiting: asyncio.Queue[tuple[list[int], Draw, asyncio.Future[Generated]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._model = await self._run(self._build)
        self._loop = asyncio.create_task(self._serve())

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        await self._waiting.put((list(prompt_token_ids), draw, future))
        return await future

    async def load_weights(self, directory: str) -> None:
        await self._run(self._load, directory)

    async def check_health(self) -> None:
        if self._loop is None or self._loop.done():
            raise EnginePoisoned("The engine's loop has ended.")

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        self._thread.shutdown(wait=False)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [item for item in batch if not item[2].done()]
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[list[int], Draw, asyncio.Future[Generated]]]) -> None:
        prompts, draws = [item[0] for item in batch], [item[1] for item in batch]
        try:
            answers = await self._run(generate_batch, self._model, prompts, draws, self._codec.stop_token_ids)
        except Exception as error:  # noqa: BLE001 (border of a batch: each request gets the cause)
            for *_, future in batch:
                if not future.done():
                    future.set_exception(EnginePoisoned(f"The batch failed: {type(error).__name__}: {error}"))
            return
        for (*_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def _build(self) -> Any:
        return build_model(self._model_dir, self.config)

    def _load(self, directory: str) -> None:
        load_into(self._model, directory)


def build_model(model_dir: str, config: GenerationConfig) -> Any:
    """A model of the directory's config.json with arbitrary weights, ready to be loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.gpus_per_replica == 0:
        torch.set_num_threads(1)
    dtype = getattr(torch, config.dtype)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype).eval()
    return model.to("cuda") if config.gpus_per_replica > 0 else model


def load_into(model: Any, directory: str) -> None:
    """Copy every tensor of a Hugging Face directory into the model, in place.

    Raises:
        RuntimeError: a parameter found no tensor, or a tensor no parameter.
    """
    from pathlib import Path

    import torch

    tensors = dict(weights.iterate(Path(directory)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors:
                raise RuntimeError(f"{directory} lacks {name}.")
            parameter.copy_(tensors.pop(name))
    leftover = sorted(set(tensors) - set(model.state_dict()))
    if leftover:
        raise RuntimeError(f"{directory} has {leftover[0]}, which the model has not.")


def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], draws: Sequence[Draw], stop_token_ids: frozenset[int]
) -> list[Generated]:
    """Answer several prompts together; each row ends at a stop token or at its own limit."""
    import torch

    from roundhouse.generation.sampling import draw_row, generators

    device = next(model.parameters()).device
    input_ids, mask = _left_padded(prompts, device)
    rows, made = len(prompts), generators(draws)
    ids: list[list[int]] = [[] for _ in range(rows)]
    log_probs: list[list[float]] = [[] for _ in range(rows)]
    finished = [""] * rows
    cache: Any = None
    with torch.inference_mode():
        while not all(finished):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            out = model(
                input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache, logits_BV = out.past_key_values, out.logits[:, -1].float().cpu()
            for row in range(rows):
                if finished[row]:
                    continue
                token, log_prob = draw_row(logits_BV[row], draws[row], made[row])
                ids[row].append(token)
                log_probs[row].append(log_prob)
                if token in stop_token_ids:
                    finished[row] = "stop"
                elif len(ids[row]) >= draws[row].max_tokens:
                    finished[row] = "length"
            input_ids = torch.tensor([[row_ids[-1]] for row_ids in ids], device=device)
            mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
    return [Generated(*answer) for answer in zip(ids, log_probs, finished, strict=True)]


def _left_padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token IDs and attention mask, both [rows, longest prompt]."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return input_ids.to(device), mask.to(device)
