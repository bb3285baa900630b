import json

import verifiers.v1 as vf


class RowData(vf.TaskData):
    answer: str


class RowTask(vf.Task[RowData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class RowTaskset(vf.Taskset[RowTask, vf.TasksetConfig]):
    def load(self) -> list[RowTask]:
        with open("rows.jsonl") as file:
            rows = [json.loads(line) for line in file]
        return [RowTask(RowData(prompt=row["question"], answer=row["answer"]), self.config.task) for row in rows]


__all__ = ["RowTaskset"]
