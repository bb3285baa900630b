from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.errors import ConfigError
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import load_model
from roundhouse.training.forward import Scorer, recompute_log_probs
from roundhouse.training.packing import Microbatch, build_microbatches, pack
from tests.training import reference
from tests.training.families import FAMILIES
from tests.training.tiny import plain_model, record, records, sequences

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 100))
def test_bins_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert len(members) == 1 or sum(lengths[index] for index in members) <= budget
        assert [lengths[index] for index in members] == sorted((lengths[index] for index in members), reverse=True)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 100))
def test_first_fit_leaves_no_two_bins_that_would_fit_into_one(lengths: list[int], budget: int) -> None:
    filled = sorted(sum(lengths[index] for index in members) for members in pack(lengths, budget))
    assert all(a + b > budget for a, b in itertools.pairwise(filled))


def test_packing_two_thousand_sequences_fills_the_bins() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1, 2048).astype(int) + 1, 16384).tolist()
    bins = pack(lengths, 16384)
    full = [sum(lengths[index] for index in members) / 16384 for members in bins[:-1]]
    assert np.mean(full) > 0.995


def with_a_common_beginning(rows: list[dict], length: int) -> list[dict]:
    """The same after a system message of so many tokens."""
    return [
        row
        | {
            "token_ids": [7, 3, 9, 4] * (length // 4) + row["token_ids"],
            "loss_mask": [0] * length + row["loss_mask"],
            "gen_logprobs": [0.0] * length + row["gen_logprobs"],
        }
        for row in rows
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 300), st.booleans())
def test_microbatches_predict_every_trained_token_once_from_its_own_prefix(
    seed: int, budget: int, packed: bool
) -> None:
    batch = sequences(3, 3, seed=seed)
    microbatches = build_microbatches(batch, range(len(batch)), batch.loss_mask, budget=budget, packed=packed)
    sources = np.concatenate([microbatch.source for microbatch in microbatches])
    assert sorted(sources.tolist()) == np.flatnonzero(batch.loss_mask).tolist()
    for microbatch in microbatches:
        for source, at, target in zip(microbatch.source, microbatch.predict, microbatch.targets, strict=True):
            owner = batch.sequence_of_token[source]
            assert int(target) == batch.token_ids[source]
            assert seen_at(microbatch, int(at)) == batch.token_ids[batch.offsets[owner] : source].tolist()


def seen_at(microbatch: Microbatch, at: int) -> list[int]:
    """The tokens that a position of a row sees: its own sequence up to it, and the prompts before that."""
    ids, positions = microbatch.input_ids.flatten().tolist(), microbatch.position_ids.flatten().tolist()
    start = at
    while positions[start] > 0 and start > 0 and positions[start - 1] == positions[start] - 1:
        start -= 1
    seen = ids[start : at + 1]
    if positions[start] == 0:
        return seen
    assert microbatch.spans is not None
    [span] = [span for span in microbatch.spans if span.start <= start < span.stop]
    while span.prompt is not None:
        span = microbatch.spans[span.prompt]
        assert span.count == 1
        seen = ids[span.start : span.stop] + seen
    assert len(seen) == positions[at] + 1
    return seen


def shared_prompts() -> list[dict]:
    """Groups with a prompt of 30 tokens: uneven answers, one of a single token, one longer than the rest together."""
    rows = []
    for group, lengths in enumerate([(1, 5, 5, 9), (3, 60), (1, 1)]):
        prompt = record(f"p{group}", "g", 0.0)["token_ids"] * 30
        for number, length in enumerate(lengths):
            row = record(f"{group}/{number}", "g", 0.0)
            own = (row["token_ids"] * 30)[:length]
            rows.append(row | {"token_ids": prompt[:30] + own, "loss_mask": [0] * 30 + [1] * length})
            rows[-1]["gen_logprobs"] = [0.0] * 30 + [-1.0] * length
    return rows


def test_a_prompt_that_is_shared_is_computed_once(model_dir: Path) -> None:
    batch = TrainingSequences.from_records(shared_prompts())
    [row] = build_microbatches(batch, range(len(batch)), batch.loss_mask, budget=4096, packed=True)
    # the prompts have their first 10 tokens in common, and every last token predicts nothing
    assert row.real_tokens == 10 + 3 * 20 + (0 + 4 + 4 + 8) + (2 + 59) + 0
    assert sum(span.prompt is not None for span in row.spans or ()) == 3 + 4, (
        "the rest of each prompt; 5, 5 and 9 tokens in two calls, 3 and 60 in two"
    )


@pytest.mark.parametrize("budget", [30, 90, 4096])
def test_what_all_prompts_begin_with_is_computed_once_a_row(budget: int) -> None:
    rows = with_a_common_beginning(records(groups=3, size=3), 20)
    batch = TrainingSequences.from_records(rows)
    microbatches = build_microbatches(batch, range(len(batch)), batch.loss_mask, budget=budget, packed=True)
    for microbatch in microbatches:
        tokens = microbatch.input_ids.flatten().tolist()
        assert sum(tokens[i : i + 8] == [7, 3, 9, 4] * 2 for i in range(0, len(tokens))) == 4, (
            "20 tokens have it 4 times"
        )
        assert len(tokens) <= budget or len({batch.sequence_of_token[source] for source in microbatch.source}) == 1
        for source, at in zip(microbatch.source, microbatch.predict, strict=True):
            owner = batch.sequence_of_token[source]
            assert seen_at(microbatch, int(at)) == batch.token_ids[batch.offsets[owner] : source].tolist()


@pytest.mark.parametrize("beginning", [0, 4, 40])
@pytest.mark.parametrize("budget", [35, 60, 4096])
def test_sharing_a_prompt_changes_no_log_probability_and_no_gradient(
    model_dir: Path, budget: int, beginning: int
) -> None:
    rows = with_a_common_beginning(shared_prompts(), beginning)
    if beginning:  # one whose prompt is the common beginning, and nothing more
        own = {"token_ids": [7, 3, 9, 4] * (beginning // 4) + [5, 6], "loss_mask": [0] * beginning + [1, 1]}
        rows.append(record("p", "g", 0.0) | own | {"gen_logprobs": [0.0] * beginning + [-1.0, -1.0]})
    batch = TrainingSequences.from_records(rows)
    results = []
    for packed in (True, False):
        scorer = Scorer(load_model(model_dir, packed=packed, device=CPU))
        weights = torch.linspace(-1, 2, len(batch.token_ids))
        found = torch.zeros(len(batch.token_ids))
        for microbatch in build_microbatches(batch, range(len(batch)), batch.loss_mask, budget=budget, packed=packed):
            log_probs = scorer.predict(microbatch).log_probs
            found[microbatch.source] = log_probs.detach()
            (log_probs * weights[microbatch.source]).sum().backward()
        results.append((found, [parameter.grad for parameter in scorer.model.parameters()]))
    (shared, ours), (whole, theirs) = results
    torch.testing.assert_close(shared, whole, rtol=0, atol=1e-5)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5 * float(their.abs().max()))


@pytest.mark.parametrize("budget", [1, 40, 97, 4096])
def test_packed_padded_and_single_sequences_have_the_same_log_probabilities(model_dir: Path, budget: int) -> None:
    rows = records(groups=3, size=6)
    batch = TrainingSequences.from_records(rows)
    alone = np.zeros(len(batch.token_ids), dtype=np.float32)
    plain = plain_model(model_dir)
    with torch.no_grad():
        for s, row in enumerate(rows):
            for position, value in reference.log_probs(plain, row)[0].items():
                alone[batch.offsets[s] + position] = float(value)
    for packed in (True, False):
        model = load_model(model_dir, packed=packed, device=CPU)
        found = recompute_log_probs(Scorer(model), batch, trained=batch.loss_mask, tokens_per_microbatch=budget)
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)


def test_a_neighbour_in_the_row_changes_nothing(model_dir: Path) -> None:
    model = load_model(model_dir, packed=True, device=CPU)
    kept = record("kept", "g", 1.0)
    results = []
    for seed in range(3):
        neighbours = [record(f"n{i}", "g", 0.0, seed=seed) for i in range(4)]
        batch = TrainingSequences.from_records([kept, *neighbours])
        results.append(recompute_log_probs(Scorer(model), batch, trained=batch.loss_mask)[: batch.offsets[1]])
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(results[0], results[2], rtol=0, atol=2e-6)


def test_a_packed_model_called_without_spans_says_what_to_do(model_dir: Path) -> None:
    model = load_model(model_dir, packed=True, device=CPU)
    with pytest.raises(ConfigError, match="without spans"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2"])
def test_windows_sinks_and_caps_hold_across_shared_prompts(model_type: str, tmp_path: Path) -> None:
    [family] = [family for family in FAMILIES if family.model_type == model_type]
    directory = family.save(tmp_path)
    batch = TrainingSequences.from_records(shared_prompts())
    packed, alone = (
        recompute_log_probs(Scorer(load_model(directory, packed=packed, device=CPU)), batch, trained=batch.loss_mask)
        for packed in (True, False)
    )
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-5)
