"""The smallest worker: one completion, judged."""

from __future__ import annotations

from typing import Any

from roundhouse.compat.nexrl.evaluation import AnswerTag
from roundhouse.compat.nexrl.worker import BaseRolloutWorker


class SimpleRolloutWorker(BaseRolloutWorker):
    """Answers the item's `prompt` once. Without an evaluator of its own: the text in <answer> must be the `ground_truth`."""

    evaluator = AnswerTag()

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        if not task.get("prompt"):
            return None
        answer = await self.llm.completion(self.format_task_query(task))
        return await self.put_trajectory(task, answer["response"])
