import json

import reasoning_gym
import verifiers.v1 as vf

PROBLEMS = reasoning_gym.create_dataset(
    "chain_sum", size=200, seed=0, min_terms=2, max_terms=3, min_digits=1, max_digits=2
)


class ProblemData(vf.TaskData):
    entry: str


class ProblemTask(vf.Task[ProblemData]):
    @vf.reward(weight=1.0)
    async def score(self, trace: vf.Trace) -> float:
        return PROBLEMS.score_answer(trace.last_reply or "", json.loads(self.data.entry))


class ProblemTaskset(vf.Taskset[ProblemTask, vf.TasksetConfig]):
    def load(self) -> list[ProblemTask]:
        return [
            ProblemTask(ProblemData(prompt=each["question"], entry=json.dumps(each)), self.config.task)
            for each in PROBLEMS
        ]


__all__ = ["ProblemTaskset"]
