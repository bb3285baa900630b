"""Packing and balance: how full the bins, how equal the ranks, in how many CPU milliseconds, beside TRL, SkyRL and verl.

    python benchmarks/packing.py [--peer-python /path/to/python] [--repeats N]

2,048 log-normal lengths into bins of 16,384 tokens, dealt to 8 ranks. `full` is tokens ÷ capacity of all bins; no packing can
do better than the lower bound, ⌈tokens / 16,384⌉ bins. `imbalance` is the busiest rank's work ÷ the mean − 1, where work is
the sum of squared lengths. Peers run in the interpreter of `--peer-python` (this one by default), each by its own function;
one that cannot be imported there is skipped. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from roundhouse.training.packing import CostModel, deal, imbalance, pack, waiting

BUDGET, RANKS, SEQUENCES, SEEDS = 16_384, 8, 2_048, 5
COST = CostModel(knee=35_000)
"""That of a dense model of about 1.5 B parameters."""

PEERS = {
    "skyrl first-fit-decreasing": """
from skyrl.train.dataset.bin_packing import make_seq_packer
packer = make_seq_packer("first_fit_decreasing", budget, min_bin_count=ranks, bin_count_multiple=1)
run = lambda: packer.pack(lengths)
""",
    "skyrl balanced": """
from skyrl.train.dataset.bin_packing import make_seq_packer
packer = make_seq_packer("balanced", budget, min_bin_count=ranks, bin_count_multiple=1)
run = lambda: packer.pack(lengths)
""",
    "trl pack_dataset bfd": """
import datasets
from trl import pack_dataset
datasets.disable_progress_bars()
offsets = [0]
for length in lengths: offsets.append(offsets[-1] + length)
table = datasets.Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]})
last = []
def run():
    last[:] = [pack_dataset(table, seq_length=budget, strategy="bfd", map_kwargs={"load_from_cache_file": False})]
def bins():
    return [list(dict.fromkeys(row)) for row in last[0]["input_ids"]]
""",
    "verl karmarkar-karp (ranks)": """
import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
work = calculate_workload(torch.tensor(lengths)).tolist()
run = lambda: get_seqlen_balanced_partitions(work, ranks, equal_size=True)
""",
}
"""Each defines `run`, which is timed and returns bins of indices (or `bins` does)."""

HARNESS = """
import json, sys, time
lengths, budget, ranks, repeats = json.loads(sys.stdin.read())
{peer}
seconds, found = [], None
for _ in range(repeats + 1):
    begun = time.process_time()
    found = run()
    seconds.append(time.process_time() - begun)
found = bins() if "bins" in globals() else found
print("\\n" + json.dumps({{"seconds": seconds[1:], "bins": [[int(i) for i in part] for part in found]}}))
"""


def make_lengths(seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(7.2, 1, SEQUENCES).astype(int) + 1, BUDGET)


def ours(lengths: np.ndarray, repeats: int) -> tuple[list[list[int]], list[Any], list[float]]:
    """Bins, what each rank gets, and CPU seconds of both steps together."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.process_time()
        bins = pack(lengths.tolist(), BUDGET)
        dealt = deal(bins, lengths, BUDGET, COST, RANKS)
        seconds.append(time.process_time() - begun)
    return bins, dealt, seconds[1:]


def peer(name: str, python: str, lengths: np.ndarray, repeats: int) -> dict[str, Any] | str:
    """The peer's bins and CPU seconds, or why it is skipped."""
    finished = subprocess.run(
        [python, "-c", HARNESS.format(peer=PEERS[name])],
        input=json.dumps([lengths.tolist(), BUDGET, RANKS, repeats]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = finished.stdout.strip().splitlines()
    if finished.returncode or not lines:
        return (finished.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(lines[-1])


def fill(lengths: np.ndarray, bins: list[list[int]]) -> float:
    return float(lengths.sum()) / (len(bins) * BUDGET)


def in_turn(bins: list[list[int]]) -> list[list[list[int] | None]]:
    """Bins dealt as they come, for a peer that does not say which rank gets which."""
    whole: list[list[int] | None] = [*bins, *[None] * (-len(bins) % RANKS)]
    return [whole[rank::RANKS] for rank in range(RANKS)]


def show(case: str, bins: int, full: float | None, uneven: float, seconds: list[float]) -> None:
    spread = f"{1e3 * min(seconds):.1f} … {1e3 * max(seconds):.1f}"
    filled = "–" if full is None else f"{full:.2%}"
    print(f"{case:<36}{bins:>6}{filled:>9}{uneven:>12.2%}{1e3 * statistics.median(seconds):>10.1f}  {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of an environment with the peers")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{SEQUENCES} sequences, bins of {BUDGET}, {RANKS} ranks; {arguments.repeats} repeats\n")
    print(f"{'case':<36}{'bins':>6}{'full':>9}{'imbalance':>12}{'CPU ms':>10}  spread")
    results: list[dict[str, Any]] = []
    for seed in range(SEEDS):
        lengths = make_lengths(seed)
        squares = np.square(lengths, dtype=np.float64)
        bins, dealt, seconds = ours(lengths, arguments.repeats)
        filled, uneven = fill(lengths, bins), imbalance(dealt, squares)
        show(f"roundhouse, seed {seed}", len(bins), filled, uneven, seconds)
        for what, value, unit in (
            ("bins over the lower bound", len(bins) + int(-lengths.sum() // BUDGET), "bins"),
            ("full", round(filled, 5), "share"),
            ("imbalance of squared lengths", round(uneven, 5), "max/mean - 1"),
            ("waiting, turn by turn", round(waiting(dealt, COST.of(lengths)), 5), "share of the ranks' time"),
            ("pack and deal", round(1e3 * statistics.median(seconds), 3), "CPU ms"),
        ):
            results.append({"case": f"seed {seed}/{what}", "value": value, "unit": unit, "peer": None, "ratio": None})
    lengths = make_lengths(0)
    squares = np.square(lengths, dtype=np.float64)
    mine = statistics.median(ours(lengths, arguments.repeats)[2])
    for name in PEERS:
        found = peer(name, arguments.peer_python, lengths, 3)
        if isinstance(found, str):
            print(f"{name:<36}skipped: {found[:80]}")
            results.append({"case": name, "value": None, "unit": "CPU ms", "peer": "skipped", "ratio": None})
            continue
        bins, seconds = found["bins"], found["seconds"]
        full = None if len(bins) == RANKS else fill(lengths, bins)
        show(f"{name}, seed 0", len(bins), full, imbalance(in_turn(bins), squares), seconds)
        theirs = statistics.median(seconds)
        results.append(
            {
                "case": f"{name}/pack and deal",
                "value": round(1e3 * mine, 3),
                "unit": "CPU ms",
                "peer": round(1e3 * theirs, 3),
                "ratio": round(mine / theirs, 4),
            }
        )
    machine = {"cpu": platform.processor() or platform.machine(), "numpy": np.__version__}
    print("\n" + json.dumps({"bench": "packing", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
