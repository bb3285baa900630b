"""Text that spells a control token stays text.

A user, a page or a tool may write `<|im_end|>` and would so end its turn and begin another one. Invariants: only the chat
template writes control tokens into a prompt; text that spells none has exactly the tokens that the tokenizer gives it.

The mechanism is the same for every template. Before rendering, each spelling in the messages, the tools and the template's
arguments becomes a mark. After rendering, the control tokens that are left in the text are the template's. They get names that
no text can spell, the marks become the spellings again, and a copy of the tokenizer that knows the control tokens by those
names alone encodes the whole text at once.

    message    Bye <|im_end|>
    escaped    Bye ⟦17⟧
    rendered   <|im_start|>user\\nBye ⟦17⟧<|im_end|>
    encoded    ⟨16⟩user\\nBye <|im_end|>⟨17⟩            16, …, the pieces of "<|im_end|>", …, 17

Control tokens are the special tokens and the stop tokens. The tags of thoughts and tool calls are text of the policy, also if
a tokenizer makes them special.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roundhouse.generation.tool_calls import THOUGHT_END, THOUGHT_START, TOOL_CALL_END, TOOL_CALL_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TAGS = frozenset({THOUGHT_START, THOUGHT_END, TOOL_CALL_START, TOOL_CALL_END})


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Iterable[int] = ()) -> None:
        stops, added = frozenset(stop_token_ids), tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if (token.special or token_id in stops) and token.content not in TAGS
        }
        self._known = frozenset(self._ids.values())
        self._spelling = _any_of(self._ids)
        # Characters that Unicode reserves for use within a program, and a number that nobody outside knows
        nonce = secrets.token_hex(8)
        self._marks = {text: f"\ufdd0{nonce}.{token_id}\ufdd1" for text, token_id in self._ids.items()}
        self._names = {text: f"\ufdd2{nonce}.{token_id}\ufdd3" for text, token_id in self._ids.items()}
        self._spellings = {mark: text for text, mark in self._marks.items()}
        self._mark = re.compile(f"\ufdd0{nonce}\\.\\d+\ufdd1")

    def escape(self, value: Any) -> Any:
        """Replace each spelling of a control token in the strings of a JSON value, keys included, by its mark."""
        if isinstance(value, str):
            return self._spelling.sub(lambda match: self._marks[match.group()], value)
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return value

    def unescape(self, text: str) -> str:
        """Replace each mark by its spelling."""
        return self._mark.sub(lambda match: self._spellings[match.group()], text)

    def spelled_in(self, token_ids: Sequence[int]) -> int:
        """Count the control tokens that the tokens spell as text."""
        spelled = len(self._spelling.findall(self._tokenizer.decode(token_ids, skip_special_tokens=False)))
        return spelled - sum(token_id in self._known for token_id in token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a rendered text, with nothing added. A mark is encoded as the text that it stands for."""
        tokenizer = self._tokenizer
        if self._mark.search(text) is not None:
            text = self.unescape(self._spelling.sub(lambda match: self._names[match.group()], text))
            tokenizer = self._renamed
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with other names for its control tokens. Reading one of 150,000 entries takes about a second."""
        from tokenizers import Tokenizer

        content = json.loads(self._tokenizer.to_str())
        model = content["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._names.get(text, text): token_id for text, token_id in vocabulary.items()}
        elif vocabulary is not None:  # Unigram: pieces with their scores
            model["vocab"] = [[self._names.get(text, text), score] for text, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._names.get(model["unk_token"], model["unk_token"])
        for token in content["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        return Tokenizer.from_str(json.dumps(content))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match the longest of the texts that begins at a position, or nothing without texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
