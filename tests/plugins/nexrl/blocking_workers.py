"""Workers that block as their items request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from roundhouse.plugins.nexrl import BaseRolloutWorker, EvaluationRunResult
from tests.gym.blocking_world import block


class Player(BaseRolloutWorker):
    """A worker."""

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        answer = await self.llm.generate([{"role": "user", "content": task["prompt"]}])
        if task["how"] == "nothing":
            return None
        if task["how"] == "raises":
            raise KeyError("x")
        if task["how"] == "again":
            while True:
                answer = await self.llm.generate([{"role": "user", "content": "x"}, answer["message"]])
        if task["how"] == "late":
            self._asking = asyncio.get_running_loop().create_task(self._ask_late(Path(task["file"])))
        block(task["how"])
        result = EvaluationRunResult(1.0, extra_info={"kind": type(task), "calls": len(self.llm.infos)})
        return await self.put_trajectory(task, answer["response"], result=result)

    async def _ask_late(self, file: Path) -> None:
        await asyncio.sleep(0.3)
        try:
            await self.llm.completion("x")
        except Exception as error:  # noqa: BLE001 - the test reads it
            await asyncio.to_thread(file.write_text, str(error))


class PlainPlayer(BaseRolloutWorker):
    """A worker of plain functions."""

    def step(self, task: dict[str, Any]) -> Any:
        answer = self._llm_client.completion(task["prompt"])
        block(task["how"])
        return self._put_trajectory({"response": answer["response"], "reward": 1.0})
