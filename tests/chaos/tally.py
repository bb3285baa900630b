"""The count of a campaign: kills by process and by stage, verdicts, one line of JSON."""

from __future__ import annotations

import json
from collections import Counter

from tests.chaos.trial import Done, Trial


class Tally:
    """Results of a campaign so far."""

    def __init__(self, seed: int, baseline: Trial) -> None:
        self._seed = seed
        self._baseline = baseline
        self.trials: list[Trial] = []
        self._differing: list[str] = []
        self._hung: list[str] = []

    @property
    def failed(self) -> int:
        return len(self._differing) + len(self._hung)

    @property
    def done(self) -> list[Done]:
        return [done for trial in self.trials for done in trial.done]

    @property
    def random_kills(self) -> int:
        return sum(not _is_planted(done) for done in self.done)

    def add(self, trial: Trial) -> str:
        """Judge a trial and return a report."""
        differences = trial.outcome.differences(self._baseline.outcome)
        self.trials.append(trial)
        if differences:
            self._differing.append(trial.run_id)
        verdict = "DIFFERENT" if differences else "equal"
        head = f"{trial.run_id}: {verdict}, {len(trial.done)} kills, {trial.starts} starts, {trial.seconds:.0f} s"
        return "\n".join([head, *(f"    {line}" for line in (*trial.done, *differences))])

    def add_hang(self, run_id: str, error: TimeoutError) -> str:
        self._hung.append(run_id)
        return f"{run_id}: HANGS\n    {error}"

    def table(self) -> str:
        """Kills by process and by stage."""
        lines = ["", f"{'killed':<20}kills"]
        lines += [f"{target:<20}{count}" for target, count in self._by_target().most_common()]
        lines += ["", f"{'in':<20}kills at random moments"]
        lines += [f"{stage:<20}{count}" for stage, count in self._by_stage().most_common()]
        return "\n".join(lines)

    def json(self) -> str:
        planted = len(self.done) - self.random_kills
        restarts = sum(trial.starts - 1 for trial in self.trials)
        results: list[dict[str, object]] = [
            {"case": "kills at random moments", "value": self.random_kills, "unit": "kills"},
            {"case": "kills at planted operations", "value": planted, "unit": "kills"},
            {"case": "trials", "value": len(self.trials), "unit": "runs"},
            {"case": "trials that differ", "value": len(self._differing), "unit": "runs"},
            {"case": "trials that hang", "value": len(self._hung), "unit": "runs"},
            {"case": "starts again", "value": restarts, "unit": "starts"},
            {"case": "rollouts trained on", "value": self._baseline.outcome.consumed, "unit": "rollouts a run"},
            {"case": "uninterrupted", "value": round(self._baseline.seconds, 1), "unit": "s"},
        ]
        results += [
            {"case": f"kills of {target}", "value": count, "unit": "kills"}
            for target, count in self._by_target().items()
        ]
        results += [
            {"case": f"kills in {stage}", "value": count, "unit": "kills"} for stage, count in self._by_stage().items()
        ]
        return json.dumps({"bench": "chaos", "seed": self._seed, "results": results})

    def _by_target(self) -> Counter[str]:
        return Counter(done.target for done in self.done)

    def _by_stage(self) -> Counter[str]:
        return Counter(done.where.rpartition("/")[2] for done in self.done if not _is_planted(done))


def _is_planted(done: Done) -> bool:
    return done.target.endswith("(planted)")
