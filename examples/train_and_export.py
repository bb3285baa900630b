"""Train a small policy, look at its rollouts, and export the model: `python examples/train_and_export.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.dataset as ds

import roundhouse as rh


class Weather(rh.Environment):
    """An environment of your own: `environment: {kind: custom, target: "train_and_export.py:Weather"}`."""

    name = "weather"

    def tasks(self, split: str) -> list[dict[str, object]]:
        city = {"train": "Oslo", "heldout": "Bergen"}[split]
        return [rh.task_row(f"Is it raining in {city}?", task_id=city, tools=self.tool_schemas(), answer="yes")]

    @rh.tool("Look up the weather.", city="Name of the city.")
    async def weather(self, session: object, city: str) -> str:
        return "rain"

    async def verify(self, session: object, row: dict[str, object], response: dict[str, object]) -> rh.Verdict:
        return rh.Verdict(reward=float(str(row["answer"]) in rh.final_text(response).lower()))


class Printed:
    """A metrics sink of your own."""

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        print(iteration, metrics.get("reward/mean"))


SINK: rh.Sink = Printed()


def best_rollouts(run: rh.RunHandle, iteration: int) -> list[str]:
    """Return the conversations of an iteration's rewarded rollouts."""
    rows = run.rollouts(iteration=iteration, split="train").filter(ds.field("reward") > 0.5)
    return [str(row["messages"]) for row in rows]


def main() -> Path:
    run = rh.train("configs/quickstart.yaml", iterations=3, **{"generation.backend": "trainer"})
    frame = run.metrics()
    print(frame["reward/mean"].dropna())
    frame.plot(y="evaluation/reward/mean").get_figure()
    print(len(best_rollouts(run, 3)), "rollouts with reward")
    print(rh.query("SELECT iteration, avg(reward) FROM rollouts GROUP BY 1", runs=[run]))
    fork = run.fork("slower", at=1, **{"train.optimizer.learning_rate": 1e-5})
    print(run.compare(fork).differences, [each.run_id for each in rh.runs()])
    return run.checkpoint().export("model", dtype="bfloat16")


if __name__ == "__main__":
    print(main())
