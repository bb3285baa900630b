"""Validation as a gate: false alarms among clean rollouts, and what the proofs cost of an iteration.

    python benchmarks/validate.py [--rollouts 100000] [--batch 1024] [--turns 3] [--tokens 64]

Clean rollouts are made as a collect stage would leave them: groups of 8 of one task, turns that continue one another, text that
a tokenizer gives, seeds of the plan, measured times. A quarter repeats the words and log-probabilities of a sibling, as a
certain policy does. Each batch goes through every proof that the validate stage runs, text included, on tables read
back as from the store; then its log-probabilities are compared with the same ones under rounding noise, as the train stage does
with those it recomputes. CPU seconds are those of this process; the share is of an iteration of 10 s with one batch.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from roundhouse.config.models import ValidationConfig
from roundhouse.policy.tokenizer import TURN_END, train_tokenizer
from roundhouse.stages.validate import DecodedText, mismatched, recorded_counts
from roundhouse.trajectories.records import GrowingDigest, Rollout, Status, Turn, derive_seed
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table
from roundhouse.trajectories.validation import CollectionLimits, validate

GROUP, ITERATION_SECONDS, WORDS = 8, 10.0, [f"word{number} of {number * 7}" for number in range(200)]


class CleanRollouts:
    """Makes rollouts that nothing is wrong with."""

    def __init__(self, directory: Path, turns: int, tokens: int) -> None:
        tokenizer = train_tokenizer([f"The answer is {word}." for word in WORDS])
        tokenizer.save_pretrained(directory)
        self.directory, self.vocabulary, self.turns, self.tokens = directory, len(tokenizer), turns, tokens
        self._core = tokenizer.backend_tokenizer
        self._end = tokenizer.encode(TURN_END, add_special_tokens=False)[0]

    def batch(self, number: int, count: int) -> list[Rollout]:
        rng = random.Random(number)
        made: list[Rollout] = []
        for index in range(count):
            group, sample = f"b{number}g{index // GROUP}", index % GROUP
            said = made[-1] if sample and rng.random() < 0.25 else None
            made.append(self._rollout(rng, group, sample, time.time() + index, said))
        return made

    def _rollout(self, rng: random.Random, group: str, sample: int, begun: float, said: Rollout | None) -> Rollout:
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": f"{group}?"}]
        rollout = Rollout(
            group_id=group,
            sample=sample,
            task={"task_id": group, "responses_create_params": {"input": [{"role": "user", "content": f"{group}?"}]}},
            environment="clean",
            status=Status.COMPLETED,
            seed=derive_seed(1, group, sample),
            reward=float(rng.random() < 0.5),
            items=items,
            finish_reason="stop",
            started_at=begun,
            seconds=rng.random(),
            generation_seconds=rng.random() / 2,
        )
        digest, length = GrowingDigest(), 0
        for turn in range(self.turns):
            new = self._core.encode(f"{group} {turn}", add_special_tokens=False).ids
            if said is not None:
                generated = said.turns[turn].generation_token_ids
                log_probs = said.turns[turn].generation_log_probs
            else:
                text = " ".join(rng.choice(WORDS) for _ in range(self.tokens))
                ids = self._core.encode(text, add_special_tokens=False).ids[: self.tokens - 1]
                generated = [*ids, self._end]
                log_probs = [-rng.expovariate(2) for _ in generated]
            prompt_digest, length = digest.extend(new), length + len(new)
            rollout.turns.append(
                Turn(
                    turn,
                    turn - 1 if turn else None,
                    new,
                    length,
                    prompt_digest,
                    generated,
                    log_probs,
                    3,
                    "stop",
                    rng.random(),
                )
            )
            digest.extend(generated)
            length += len(generated)
            text = self._core.decode(generated[:-1], skip_special_tokens=False)
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
            items.append({"type": "message", "role": "user", "content": f"{turn}"})
        return rollout


def read_and_prove(
    tables: tuple[pa.Table, pa.Table], clean: CleanRollouts, text: DecodedText
) -> tuple[float, float, Any]:
    """CPU seconds of reading the records, of the proofs and tables, and what came out."""
    begun = time.process_time()
    rollouts = rollouts_from_tables(*tables)
    read = time.process_time()
    result = validate(
        rollouts,
        ValidationConfig(),
        vocabulary_size=clean.vocabulary,
        policy_version=3,
        terms=CollectionLimits(
            clean.vocabulary,
            policy_version=3,
            group_size=GROUP,
            max_new_tokens=clean.tokens,
            max_turns=clean.turns,
        ),
        recorded=recorded_counts(*tables),
        text=text,
    )
    return read - begun, time.process_time() - read, result


def compare(result: Any) -> tuple[float, int]:
    """CPU seconds of holding recorded log-probabilities against those a train stage would have written, and alarms."""
    recorded = result.sequences.column("gen_logprobs").combine_chunks()
    noise = np.random.default_rng(0).normal(0, 0.02, len(recorded.flatten())).astype(np.float32)
    flat = recorded.flatten().to_numpy()
    trainer = pa.ListArray.from_arrays(recorded.offsets, pa.array(np.where(flat != 0, flat + noise, 0)))
    columns = pa.table({"trainer_logprobs": trainer})
    begun = time.process_time()
    found = mismatched(result.sequences, columns, policy_version=3, tolerance=0.25)
    return time.process_time() - begun, found.num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1_024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of a turn, at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        clean = CleanRollouts(Path(directory), arguments.turns, arguments.tokens)
        text = DecodedText(Path(directory))
        refused, proved, done, trained = 0, 0, 0, 0
        reading: list[float] = []
        proving: list[float] = []
        comparing: list[float] = []
        while done < arguments.rollouts:
            made = clean.batch(len(proving), min(arguments.batch, -(-(arguments.rollouts - done) // GROUP) * GROUP))
            read, prove, result = read_and_prove((rollouts_table(made), turns_table(made)), clean, text)
            done += len(made)
            refused += result.quarantine.num_rows
            proved += result.text_proved
            trained += sum(len(turn.generation_token_ids) for rollout in made for turn in rollout.turns)
            reading.append(read / len(made))
            proving.append(prove / len(made))
            seconds, alarms = compare(result)
            comparing.append(seconds / len(made))
            refused += alarms
            if result.reasons:
                print(f"false alarm: {result.reasons}")
    show(arguments.batch, done, refused, proved, trained, reading, proving, comparing)
    sys.exit(refused > 0)


def show(batch: int, done: int, refused: int, proved: int, trained: int, *parts: list[float]) -> None:
    whole = np.median(np.sum(parts, axis=0))
    reading, proving, comparing = parts
    results = [
        ("false alarms", refused, f"of {done} rollouts"),
        ("text proved", proved, "rollouts"),
        ("generated tokens a rollout", round(trained / done, 1), "tokens"),
        ("reading the records", round(1e3 * float(np.median(reading)), 4), "CPU s per 1,000 rollouts"),
        ("proofs and sequences", round(1e3 * float(np.median(proving)), 4), "CPU s per 1,000 rollouts"),
        ("recomputed log-probabilities", round(1e3 * float(np.median(comparing)), 4), "CPU s per 1,000 rollouts"),
        ("slowest batch, proofs", round(1e3 * max(proving), 4), "CPU s per 1,000 rollouts"),
        (f"share of {ITERATION_SECONDS:g} s, 128 rollouts", round(float(128 * whole / ITERATION_SECONDS), 5), "share"),
        (
            f"share of {ITERATION_SECONDS:g} s, {batch} rollouts",
            round(float(batch * whole / ITERATION_SECONDS), 5),
            "share",
        ),
    ]
    for case, value, unit in results:
        print(f"{case:<36}{value:>14} {unit}")
    rows = [{"case": case, "value": value, "unit": unit, "peer": None, "ratio": None} for case, value, unit in results]
    machine = {"cpu": platform.processor() or platform.machine(), "pyarrow": pa.__version__}
    print("\n" + json.dumps({"bench": "validate", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
