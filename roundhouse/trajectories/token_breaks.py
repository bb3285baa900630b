"""Find model calls with a prompt that does not begin with the tokens so far, and their cause.

Invariant: every call but the first that does not continue the previous call is reported once, with the first differing
position, the tokens on both sides, and one likely cause, read from tokens (and from text, if a tokenizer is available).
A *fork* is a separate conversation (`Cause.is_fork`): a sub-agent, a branch, a compacted history; each of its paths is
trained on. Everything else is a *break*: the same conversation came back in other tokens, and `validation.on_break`
decides about the rollout.

A model call passes six stages (`records.CallStage`). From LF4 to LF5 nothing is lost; from LF5 to LF3 of the *next*
call tokens can change.

    before   [.. 10 11 12 | 20]    call 1 saw and generated these        position: first difference
    after    [.. 13 | 20 31 32]    the prompt of call 2                  here the text of 10 11 12 was tokenized as 13: merge

The differing block ends at the next `ANCHOR` equal tokens (or at the end of the tokens so far), so the repeated border
of a chat template, which is shorter, does not end it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from roundhouse.trajectories.records import CallStage, Turn
from roundhouse.trajectories.schemas import rebuild_prompts

ANCHOR = 8
"""Tokens that have to agree after a difference for it to have ended: longer than the border of a message in known templates."""
HEADER = 3
"""Number of tokens before an answer that identify its role in the usual templates, or the end of these."""
SHOWN = 8
"""Tokens of either side that a report shows from the break on, and half as many before it."""

Decode = Callable[[Sequence[int]], str]
"""Token IDs to text, special tokens included."""


class Cause(StrEnum):
    """Likely cause of a break."""

    MERGE = "merge"
    TRUNCATED_HISTORY = "truncated_history"
    STRIPPED_REASONING = "stripped_reasoning"
    TEMPLATE = "template"
    BRANCH = "branch"
    NEW_CONVERSATION = "new_conversation"
    COMPACTED_HISTORY = "compacted_history"

    @property
    def is_fork(self) -> bool:
        """Return whether the call begins a separate conversation, so that its tokens are valid."""
        return self in (Cause.BRANCH, Cause.NEW_CONVERSATION, Cause.COMPACTED_HISTORY)


_MEANING: dict[Cause, tuple[CallStage, str]] = {
    Cause.MERGE: (
        CallStage.PROMPT_TOKEN_IDS,
        "the same text was tokenized again, and tokens merged across a border; send the token fields of earlier messages back",
    ),
    Cause.TRUNCATED_HISTORY: (
        CallStage.REQUEST,
        "earlier messages are missing or shortened; raise the agent's limit of context, or set validation.on_break",
    ),
    Cause.STRIPPED_REASONING: (
        CallStage.INPUT_PROMPT,
        "a part of an earlier answer is gone, as when a template or an agent strips reasoning; keep it in the history",
    ),
    Cause.TEMPLATE: (
        CallStage.INPUT_PROMPT,
        "the chat template renders earlier messages differently; use one that keeps them unchanged",
    ),
    Cause.BRANCH: (
        CallStage.REQUEST,
        "the call continues an earlier call than the one before it: a sub-agent's or a branch of the conversation",
    ),
    Cause.NEW_CONVERSATION: (
        CallStage.REQUEST,
        "nothing that was generated before is in it: a sub-agent, or a compacted history",
    ),
    Cause.COMPACTED_HISTORY: (
        CallStage.REQUEST,
        "a whole answer is gone, and something new stands in its place: a compacted history",
    ),
}


@dataclass(frozen=True, slots=True)
class TokenBreak:
    """A call with a prompt that does not continue the previous call."""

    turn: int
    """The call."""
    before: int
    """The earlier call that it is compared with: the newest of those with the longest common prefix."""
    position: int
    """Index of the first token that differs, in the whole prompt."""
    expected: list[int]
    """Tokens so far around `position`: prompt and generation of `before`."""
    found: list[int]
    """Tokens of the prompt around `position`."""
    cause: Cause
    texts: tuple[str, str] | None = None
    """`expected` and `found` as text, if a tokenizer is available."""

    def __str__(self) -> str:
        stage, meaning = _MEANING[self.cause]
        texts = "" if self.texts is None else f", as text {self.texts[0]!r} and {self.texts[1]!r}"
        return (
            f"the prompt of call {self.turn} does not continue the recorded tokens of call {self.before}: they differ at token "
            f"{self.position}, where {self.expected} stands and {self.found} is found{texts}. Likely cause: {self.cause} "
            f"(at {stage}): {meaning}"
        )


def token_breaks(turns: Sequence[Turn], decode: Decode | None = None) -> list[TokenBreak]:
    """Return every call but the first if its prompt does not begin with all tokens of the previous call.

    Args:
        turns: in order, as `validation.prove_prompts` proved them.
        decode: without it, a small replacement counts as a merge.
    """
    if all(turn.parent == turn.turn - 1 for turn in turns[1:]):
        return []
    prompts = rebuild_prompts(turns)
    ends = [[*prompt, *turn.generation_token_ids] for prompt, turn in zip(prompts, turns, strict=True)]
    breaks = []
    for turn in turns[1:]:
        if turn.parent == turn.turn - 1:
            continue
        shared = [_common(seen, prompts[turn.turn]) for seen in ends[: turn.turn]]
        # A branch is reported by the call that it leaves, which is the one before it
        branch = turn.parent is not None or prompts[turn.turn] in prompts[: turn.turn]
        before = turn.turn - 1 if branch else max(range(turn.turn), key=lambda k: (shared[k], k))
        spans = _generated_spans(turns, prompts, before)
        position, seen, prompt = shared[before], ends[before], prompts[turn.turn]
        cause = Cause.BRANCH if branch else _cause(position, seen, prompt, spans, decode)
        start = max(0, position - SHOWN // 2)
        sides = seen[start : position + SHOWN], prompt[start : position + SHOWN]
        texts = None if decode is None else (decode(sides[0]), decode(sides[1]))
        breaks.append(TokenBreak(turn.turn, before, position, *sides, cause, texts))
    return breaks


def _cause(
    position: int, seen: list[int], prompt: list[int], generated: list[tuple[int, int]], decode: Decode | None
) -> Cause:
    lost, new = _differing(seen, prompt, position)
    if _merged(position, seen, prompt, lost, new, decode):
        return Cause.MERGE
    # With its role before it: a sub-agent that is shown an answer has it in another message
    missing = [begin for begin, end in generated if not _holds(prompt, seen[max(0, begin - HEADER) : end])]
    if position < generated[0][0] and len(missing) == len(generated):
        return Cause.NEW_CONVERSATION
    window = prompt[position : position + ANCHOR]
    if (
        window
        and not _holds(seen, window)
        and any(position < begin and _gone(prompt, seen[begin:end]) for begin, end in generated)
    ):
        return Cause.COMPACTED_HISTORY
    if any(position < begin for begin in missing):
        return Cause.TRUNCATED_HISTORY
    # the last token of an answer ends its turn, and stands in every turn
    whole = any(position <= begin and end - 1 <= lost for begin, end in generated)
    if whole and new - position < lost - position:
        return Cause.TRUNCATED_HISTORY
    inside = any(begin <= position and lost <= end for begin, end in generated)
    if new == position:
        return Cause.STRIPPED_REASONING if inside else Cause.TRUNCATED_HISTORY
    if inside and decode is not None and "</think>" in decode(seen[position:lost]):
        return Cause.STRIPPED_REASONING
    return Cause.TEMPLATE


def _merged(position: int, seen: list[int], prompt: list[int], lost: int, new: int, decode: Decode | None) -> bool:
    """Return whether other tokens spell the same text. If nothing agrees after the difference, the prompt's text must
    continue the text of the tokens so far: the last of them merged with the added text."""
    if decode is None:
        return 0 < lost - position <= ANCHOR and (0 < new - position <= ANCHOR or lost == len(seen))
    if lost == len(seen):
        return decode(prompt).startswith(decode(seen))
    return decode(prompt[:new]) == decode(seen[:lost])


def _differing(seen: list[int], prompt: list[int], position: int) -> tuple[int, int]:
    """Ends of the differing block that begins at `position`, in `seen` and in `prompt`."""
    first: dict[tuple[int, ...], int] = {}
    for place in range(len(prompt) - 1, position - 1, -1):
        first[tuple(prompt[place : place + ANCHOR])] = place
    for place in range(position, len(seen)):
        rest = tuple(seen[place : place + ANCHOR])
        if len(rest) == ANCHOR:
            if rest in first:
                return place, first[rest]
        elif (match := _place(prompt, list(rest), position)) is not None:
            return place, match
    return len(seen), len(prompt)


def _generated_spans(turns: Sequence[Turn], prompts: list[list[int]], call: int) -> list[tuple[int, int]]:
    """(begin, end) of each generation among the tokens of `call`, which continues its parents."""
    spans = []
    index: int | None = call
    while index is not None:
        begin = len(prompts[index])
        spans.append((begin, begin + len(turns[index].generation_token_ids)))
        index = turns[index].parent
    return spans[::-1]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))


def _gone(tokens: list[int], answer: list[int]) -> bool:
    """Return whether no part of an answer as long as `ANCHOR` is left."""
    windows = {tuple(tokens[place : place + ANCHOR]) for place in range(len(tokens) - ANCHOR + 1)}
    pieces = range(max(1, len(answer) - ANCHOR + 1))
    return not any(tuple(answer[place : place + ANCHOR]) in windows for place in pieces) and not _holds(tokens, answer)


def _holds(tokens: list[int], part: list[int]) -> bool:
    return _place(tokens, part, 0) is not None


def _place(tokens: list[int], part: list[int], start: int) -> int | None:
    """Return the position of `part` in `tokens`, from `start` on."""
    for place in range(start, len(tokens) - len(part) + 1):
        if tokens[place] == part[0] and tokens[place : place + len(part)] == part:
            return place
    return None
