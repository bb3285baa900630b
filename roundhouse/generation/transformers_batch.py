"""A batch of answers by a transformers model, token by token.

Invariants: a row's token depends on its own logits and its own generator only, never on the batch it is computed in; and the
log-probability returned is that of the distribution it was drawn from (temperature, then top-k, then top-p, as in vLLM). Greedy
rows (temperature 0) take the most likely token and report its log-probability at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.fast_imports import lean_transformers
from roundhouse.generation.engine import Draw, Generated, GenerationAborted
from roundhouse.weight_sync.tensor_files import iterate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Change:
    """New weights, as the running batch has to know of them."""

    version: int
    running: InflightRequests = "continue"
    recompute: bool = True
    """Keys and values of the tokens so far are computed anew."""


Between = Callable[[], Change | None]
"""Called before each token; what was done to the model since the one before."""


def build_model(model_dir: str, config: GenerationConfig) -> Any:
    """A model of the directory's config.json with arbitrary weights, ready to be loaded."""
    import torch

    if config.gpus_per_replica == 0:
        torch.set_num_threads(1)
    dtype = getattr(torch, config.dtype)
    with lean_transformers():  # a model's own module is imported when the model is built
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype).eval()
    return model.to("cuda") if config.gpus_per_replica > 0 else model


def give_back_memory() -> None:
    """Return what nothing refers to any more to the GPU and to the machine."""
    import ctypes
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps freed pages for itself
    except (OSError, AttributeError):
        return  # another C library: it has its own way


def load_into(model: Any, directory: str) -> None:
    """Copy every tensor of a Hugging Face directory into the model, in place.

    Raises:
        RuntimeError: a parameter found no tensor, or a tensor no parameter.
    """
    from pathlib import Path

    import torch

    tensors = dict(iterate(Path(directory)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors:
                raise RuntimeError(f"{directory} lacks {name}.")
            parameter.copy_(tensors.pop(name))
    leftover = sorted(set(tensors) - set(model.state_dict()))
    if leftover:
        raise RuntimeError(f"{directory} has {leftover[0]}, which the model has not.")


def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, each given those before it."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([list(token_ids)], device=device)).logits[0, :-1].float()
        chosen_T = torch.tensor(list(token_ids)[1:], device=device)
        scores: list[float] = torch.log_softmax(logits_TV, dim=-1).gather(1, chosen_T[:, None])[:, 0].tolist()
    return scores


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    draws: Sequence[Draw],
    stop_token_ids: frozenset[int],
    between: Between = lambda: None,
    version: Callable[[], int] | None = None,
) -> list[Generated]:
    """Answer several prompts together; each row ends at a stop token or at its own limit.

    Args:
        between: may change the model's weights.
        version: tells which the model holds; without it, the answers say nothing of versions.

    Raises:
        GenerationAborted: new weights came, and the batch was not to continue with them.
    """
    import torch

    device = next(model.parameters()).device
    all_ids, mask = _left_padded(prompts, device)
    input_ids = all_ids
    rows, made = [_Row(draw) for draw in draws], generators(draws)
    cache: Any = None
    with torch.inference_mode():
        while not all(row.finished for row in rows):
            if (change := between()) is not None:
                if change.running == "restart":
                    raise GenerationAborted(f"Version {change.version} came while the answer was drawn.")
                if change.recompute:
                    cache, input_ids = None, all_ids
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            out = model(
                input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache, logits_BV = out.past_key_values, out.logits[:, -1].float().cpu()
            for row, logits_V, generator in zip(rows, logits_BV, made, strict=True):
                if not row.finished:
                    row.add(*draw_row(logits_V, row.draw, generator), stop_token_ids, version and version())
            input_ids = torch.tensor([[row.ids[-1]] for row in rows], device=device)
            all_ids = torch.cat([all_ids, input_ids], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    return [Generated(row.ids, row.log_probs, row.finished, row.versions or None) for row in rows]


class _Row:
    """An answer that grows."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        self.finished = ""

    def add(self, token: int, log_prob: float, stop_token_ids: frozenset[int], version: int | None) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        if version is not None:
            before = self.versions.pop() if self.versions and self.versions[-1][0] == version else (version, 0)
            self.versions.append((version, before[1] + 1))
        if token in stop_token_ids:
            self.finished = "stop"
        elif len(self.ids) >= self.draw.max_tokens:
            self.finished = "length"


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


def draw_row(logits_V: torch.Tensor, draw: Draw, generator: torch.Generator) -> tuple[int, float]:
    """One token and its log-probability from the logits of one position."""
    import torch

    logits_V = logits_V.float()
    if draw.temperature == 0:
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        token = int(logits_V.argmax())
        return token, float(logprobs_V[token])
    logprobs_V = torch.log_softmax(_filtered(logits_V / draw.temperature, draw), dim=-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def _filtered(logits_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    import torch

    if draw.top_k is not None and draw.top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(draw.top_k).values[-1], -torch.inf)
    if draw.top_p < 1:
        ordered_V, index_V = logits_V.sort(descending=True)
        probs_V = ordered_V.softmax(-1)
        # Keep tokens until the mass before them reaches top_p, so at least one stays.
        dropped_V = probs_V.cumsum(-1) - probs_V >= draw.top_p
        logits_V = logits_V.masked_fill(dropped_V.scatter(0, index_V, dropped_V), -torch.inf)
    return logits_V


def generators(draws: Sequence[Draw]) -> list[torch.Generator]:
    """One generator a row, from its seed; without a seed from the process's own randomness."""
    import torch

    made = []
    for draw in draws:
        generator = torch.Generator()
        if draw.seed is None:
            generator.seed()
        else:
            generator.manual_seed(draw.seed)
        made.append(generator)
    return made
