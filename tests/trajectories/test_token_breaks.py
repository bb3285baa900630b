"""A break of the tokens is reported with its place, both token lists and its cause, over a tokenizer that really merges."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from roundhouse.config.models import ValidationConfig
from roundhouse.rollout.conversation import TurnChain
from roundhouse.trajectories.records import Rollout, Turn
from roundhouse.trajectories.schemas import rebuild_prompts
from roundhouse.trajectories.token_breaks import ANCHOR, Cause, token_breaks
from roundhouse.trajectories.validation import validate
from tests.trajectories.rollouts import rollout

SYSTEM = "<s>system: you answer in short words of English and call tools<e>"
USERS = [f"<s>user: what is the capital of country number {number} please<e>" for number in range(3)]
REASONED = "<think>let me look at the map of it</think>the town is Paris there<e>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(BPE(unk_token=None))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    letters = ByteLevel.alphabet()
    made.train_from_iterator(
        ["the town is Paris"] * 3 + [SYSTEM] * 3,
        BpeTrainer(vocab_size=320, special_tokens=["<s>", "<e>"], initial_alphabet=letters, show_progress=False),
    )
    return made


def turns_of(tokenizer: Tokenizer, calls: list[tuple[list[int] | str, list[int] | str]]) -> list[Turn]:
    """Turns of (whole prompt, generation), joined as a rollout joins them."""
    chain = TurnChain()
    for prompt, said in calls:
        ids = [each if isinstance(each, list) else tokenizer.encode(each).ids for each in (prompt, said)]
        chain.add(ids[0], ids[1], [-0.5 - 0.01 * k for k in range(len(ids[1]))], policy_version=0, finish_reason="stop")
    return chain.turns


def decode(tokenizer: Tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the text in tokens of one letter: possible for a model, impossible for a tokenizer."""
    return list(itertools.chain(*(tokenizer.encode(letter).ids for letter in text)))


def merged_within(t: Tokenizer):
    said = [*letters(t, "the town"), *t.encode(" is Paris here and I know it<e>").ids]
    return [
        (SYSTEM + USERS[0], said),
        (SYSTEM + USERS[0] + "the town is Paris here and I know it<e>" + USERS[1], "x<e>"),
    ]


def merged_with_what_follows(t: Tokenizer):
    return [(SYSTEM + USERS[0], letters(t, "the tow")), (SYSTEM + USERS[0] + "the town is", "x<e>")]


def dropped_oldest_messages(t: Tokenizer):
    whole = SYSTEM + USERS[0] + "the town is Paris there<e>" + USERS[1]
    return [
        (SYSTEM + USERS[0], "the town is Paris there<e>"),
        (whole, "it is London of course<e>"),
        (SYSTEM + USERS[1] + "it is London of course<e>" + USERS[2], "x<e>"),
    ]


def dropped_reasoning(t: Tokenizer):
    return [(SYSTEM + USERS[0], REASONED), (SYSTEM + USERS[0] + "the town is Paris there<e>" + USERS[1], "x<e>")]


def emptied_reasoning(t: Tokenizer):
    left = "<think></think>the town is Paris there<e>"
    return [(SYSTEM + USERS[0], REASONED), (SYSTEM + USERS[0] + left + USERS[1], "x<e>")]


def rewrote_a_tool_call(t: Tokenizer):
    call, rendered = '<call>{"name":"look"}</call><e>', '<call>{"name": "look"}</call><e>'
    return [(SYSTEM + USERS[0], call), (SYSTEM + USERS[0] + rendered + USERS[1], "x<e>")]


def wrote_todays_date(t: Tokenizer):
    return [
        (SYSTEM + USERS[0], "the town is Paris there<e>"),
        ("<s>date: 2 May<e>" + SYSTEM + USERS[0] + "the town is Paris there<e>" + USERS[1], "x<e>"),
    ]


def asked_a_sub_agent(t: Tokenizer):
    return [(SYSTEM + USERS[0], "the town is Paris there<e>"), ("<s>system: you search the web<e>" + USERS[2], "x<e>")]


def quoted_itself_to_a_sub_agent(t: Tokenizer):
    said = "the town is Paris there<e>"
    return [(SYSTEM + USERS[0], said), ("<s>system: you check towns<e><s>user: somebody says " + said, "x<e>")]


def compacted_its_history(t: Tokenizer):
    """A summary replaces the first messages; the newest answer is unchanged."""
    first, second, bot = "the town is Paris there<e>", "it is London of course<e>", "<s>bot: "
    whole = SYSTEM + USERS[0] + bot + first + USERS[1] + bot
    compacted = SYSTEM + "<s>summary: two towns were named so far<e>" + bot + second + USERS[2] + bot
    return [(SYSTEM + USERS[0] + bot, first), (whole, second), (compacted, "x<e>")]


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (merged_within, Cause.MERGE),
        (merged_with_what_follows, Cause.MERGE),
        (dropped_oldest_messages, Cause.TRUNCATED_HISTORY),
        (dropped_reasoning, Cause.STRIPPED_REASONING),
        (emptied_reasoning, Cause.STRIPPED_REASONING),
        (rewrote_a_tool_call, Cause.TEMPLATE),
        (wrote_todays_date, Cause.TEMPLATE),
        (asked_a_sub_agent, Cause.NEW_CONVERSATION),
        (quoted_itself_to_a_sub_agent, Cause.NEW_CONVERSATION),
        (compacted_its_history, Cause.COMPACTED_HISTORY),
    ],
)
def test_each_planted_break_is_found_at_its_place_with_its_cause(tokenizer: Tokenizer, plant, cause: Cause) -> None:
    turns = turns_of(tokenizer, plant(tokenizer))
    [found] = token_breaks(turns, decode(tokenizer))
    assert (found.cause, found.turn) == (cause, len(turns) - 1)
    before = [*turns[-2].prompt_token_ids, *turns[-2].generation_token_ids]
    if turns[-2].parent is not None:
        before = [*turns[0].prompt_token_ids, *turns[0].generation_token_ids, *before]
    after = turns[-1].prompt_token_ids
    assert before[: found.position] == after[: found.position]
    assert before[found.position : found.position + 1] != after[found.position : found.position + 1]
    start = max(0, found.position - 4)
    assert found.expected == before[start : found.position + 8]
    assert found.found == after[start : found.position + 8]
    assert found.texts == (tokenizer.decode(found.expected, False), tokenizer.decode(found.found, False))


def test_a_prompt_that_ends_within_an_earlier_one_is_a_break(tokenizer: Tokenizer) -> None:
    first, said = (tokenizer.encode(text).ids for text in (SYSTEM + USERS[0], "the town is Paris there<e>"))
    [found] = token_breaks(turns_of(tokenizer, [(first, said), ([*first, *said[:2]], "x<e>")]))
    assert found.cause == Cause.MERGE


def test_a_conversation_that_continues_has_no_break_however_its_tokens_would_merge(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode(SYSTEM + USERS[0]).ids
    said = letters(tokenizer, "the town is")
    turns = turns_of(tokenizer, [(first, said), ([*first, *said, *tokenizer.encode(" Paris").ids], "x")])
    assert token_breaks(turns, decode(tokenizer)) == []


def test_a_call_that_continues_an_earlier_one_is_a_branch(tokenizer: Tokenizer) -> None:
    for again in ("abx", "a"):
        turns = turns_of(tokenizer, [("a", "b"), ("abc", "d"), (again, "y")])
        assert [turn.parent for turn in turns] == [None, 0, 0 if again == "abx" else None]
        [found] = token_breaks(turns)
        assert (found.turn, found.cause, found.before) == (2, Cause.BRANCH, 1)


def agent_with_forks(t: Tokenizer) -> list[Turn]:
    """Call 1 is a sub-agent's, call 2 returns to the main conversation, call 3 is another answer to what call 2 saw, and call 4
    continues after the history was compacted."""
    main = SYSTEM + USERS[0]
    returned = main + "the town is Paris there<e>" + USERS[1]
    return turns_of(
        t,
        [
            (main, "the town is Paris there<e>"),
            ("<s>system: you search the web<e>" + USERS[2], "found it on the map<e>"),
            (returned, "it is London<e>"),
            (returned, "it is Rome now<e>"),
            (SYSTEM + "<s>summary: two towns were named so far<e>" + USERS[2], "x<e>"),
        ],
    )


def test_each_path_of_a_tree_is_a_sequence_and_each_turn_is_trained_in_the_first_that_holds_it(
    tokenizer: Tokenizer,
) -> None:
    forked = rollout(sample=0)
    forked.turns = agent_with_forks(tokenizer)
    assert [turn.parent for turn in forked.turns] == [None, None, 0, 0, None]
    config = ValidationConfig()
    result = validate(
        [forked, rollout(sample=1)], config, vocabulary_size=1000, policy_version=0, decode=decode(tokenizer)
    )
    assert (result.reasons, result.breaks) == ({}, {})
    assert [each.cause for each in result.forks["g/0"]] == [
        Cause.NEW_CONVERSATION,
        Cause.BRANCH,
        Cause.BRANCH,
        Cause.NEW_CONVERSATION,
    ]
    rows = [row for row in result.sequences.to_pylist() if row["rollout_id"] == "g/0"]
    assert [row["sequence_id"] for row in rows] == ["g/0/0", "g/0/1", "g/0/2", "g/0/3"]
    prompts, turns = rebuild_prompts(forked.turns), forked.turns
    for row, leaf, trained in zip(rows, (2, 3, 1, 4), ([0, 2], [3], [1], [4]), strict=True):
        assert row["token_ids"] == prompts[leaf] + turns[leaf].generation_token_ids
        held = [k for k in (0, leaf) if prompts[leaf][: len(prompts[k])] == prompts[k]]
        mask = [0] * len(row["token_ids"])
        for k in held:
            begin = len(prompts[k])
            mask[begin : begin + len(turns[k].generation_token_ids)] = [int(k in trained)] * len(
                turns[k].generation_token_ids
            )
        assert row["loss_mask"] == mask
    said = sum(len(turn.generation_token_ids) for turn in turns)
    assert sum(sum(row["loss_mask"]) for row in rows) == said == rows[0]["rollout_generated_tokens"]


def test_a_break_in_a_forked_rollout_is_still_refused_and_truncate_keeps_the_forks_before_it(
    tokenizer: Tokenizer,
) -> None:
    forked = rollout(sample=0)
    text = SYSTEM + USERS[0] + "the town is Paris there<e>" + USERS[2]
    forked.turns = turns_of(
        tokenizer,
        [
            (SYSTEM + USERS[0], REASONED),
            ("<s>system: you search the web<e>" + USERS[2], "found it on the map<e>"),
            (text, "x<e>"),
        ],
    )
    common = {"vocabulary_size": 1000, "policy_version": 0, "decode": decode(tokenizer)}
    refused = validate([forked, rollout(sample=1)], ValidationConfig(), **common)
    assert refused.reasons["not_contiguous"] == 1
    [found] = refused.breaks["g/0"]
    assert (found.turn, found.before, found.cause) == (2, 0, Cause.STRIPPED_REASONING)
    cut = validate([forked, rollout(sample=1)], ValidationConfig(on_break="truncate"), **common)
    assert cut.sequences["rollout_id"].to_pylist() == ["g/0", "g/0", "g/1"]


def test_without_a_tokenizer_a_long_replacement_is_no_merge(tokenizer: Tokenizer) -> None:
    assert token_breaks(turns_of(tokenizer, merged_with_what_follows(tokenizer)))[0].cause == Cause.MERGE
    changed = [*range(100, 100 + ANCHOR + 1)]
    turns = turns_of(tokenizer, [(SYSTEM, [7] * 20 + changed + [8] * 20), (SYSTEM + "y", "x")])
    assert token_breaks(turns)[0].cause == Cause.TRUNCATED_HISTORY


@pytest.mark.parametrize("on_break", ["reject", "truncate"])
def test_a_broken_rollout_is_reported_whether_it_is_refused_or_cut(tokenizer: Tokenizer, on_break) -> None:
    def made(sample: int, turns: list[Turn]) -> Rollout:
        found = rollout(sample=sample)
        found.turns = turns
        return found

    whole = turns_of(tokenizer, [(SYSTEM + USERS[0], "the town is Paris there<e>")])
    broken = made(2, turns_of(tokenizer, dropped_reasoning(tokenizer)))
    result = validate(
        [made(0, whole), made(1, whole), broken],
        ValidationConfig(on_break=on_break),
        vocabulary_size=1000,
        policy_version=0,
        decode=decode(tokenizer),
    )
    [told] = result.breaks["g/2"]
    assert told.cause == Cause.STRIPPED_REASONING
    refused = result.quarantine.to_pylist()
    assert len(refused) == (on_break == "reject")
    for row in refused:
        assert (row["reason"], row["turn"]) == ("not_contiguous", 1)
        for words in (
            str(told.position),
            str(told.expected),
            str(told.found),
            "stripped_reasoning",
            "LF2 Input Prompt",
        ):
            assert words in row["evidence"]
