"""A backend as somebody outside would write it: three methods over plain transformers, and nothing of Roundhouse's engines."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from roundhouse.generation.interface import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec


class PlainBackend(GenerationInterface):
    """Draws row by row, with the whole prompt in each pass. It knows no limit but its own 12 tokens."""

    _model: Any = None

    def prepare_for_generation(self) -> None:
        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    def finish_generation(self) -> None:
        self._model = None

    @torch.no_grad()
    def generate(self, data: GenerationDatumSpec, greedy: bool) -> GenerationOutputSpec:
        rows = []
        for ids, mask, seed in zip(data["input_ids"], data["attention_mask"], data["seeds"], strict=True):
            rows.append(self._row(ids[: int(mask.sum())], seed, greedy))
        longest = max(len(ids) for ids, _ in rows)
        output_ids_BT = torch.full((len(rows), longest), self.tokenized.pad_token_id)
        logprobs_BT = torch.zeros(len(rows), longest)
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        generated = torch.tensor([len(log_probs) for _, log_probs in rows])
        for row, (ids, log_probs) in enumerate(rows):
            output_ids_BT[row, : len(ids)] = ids
            logprobs_BT[row, len(ids) - len(log_probs) : len(ids)] = torch.tensor(log_probs)
        return {
            "output_ids": output_ids_BT,
            "generation_lengths": generated,
            "unpadded_sequence_lengths": lengths,
            "logprobs": logprobs_BT,
        }

    def _row(self, ids: torch.Tensor, seed: int, greedy: bool) -> tuple[torch.Tensor, list[float]]:
        generator, log_probs = torch.Generator().manual_seed(seed), []
        for _ in range(12):
            logits_V = self._model(ids[None]).logits[0, -1] / self.tokenized.config.sampling.temperature
            log_probs_V = logits_V.log_softmax(-1)
            token = log_probs_V.argmax() if greedy else torch.multinomial(log_probs_V.exp(), 1, generator=generator)[0]
            ids = torch.cat([ids, token[None]])
            log_probs.append(float(log_probs_V[token]))
            if int(token) in self.tokenized.stop_token_ids:
                break
        return ids, log_probs


class Unfinished(GenerationInterface):
    """It cannot generate."""

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...
