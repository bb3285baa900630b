"""A data loader and an evaluator from outside, as a recipe has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundhouse.plugins.nexrl import BaseDataLoader, BaseEvaluationTarget, EvaluationRunResult, Evaluator


class Questions(BaseDataLoader):
    """A file of one question a line, the last line first."""

    def __init__(self, file: str, is_validate: bool = False) -> None:
        self._file = file
        super().__init__(is_validate=is_validate)

    def load(self) -> Sequence[dict[str, Any]]:
        with open(self._file) as lines:
            return [{"prompt": line.strip()} for line in reversed(list(lines))]


class Parity(Evaluator):
    """Reward 1 for an answer with an odd sum of character codes: right and wrong answers alternate."""

    def evaluate(self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        return EvaluationRunResult(float(sum(map(ord, evaluation_target.final_answer)) % 2))
