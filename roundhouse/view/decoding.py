"""Token IDs as the text that each stands for.

Invariant: the texts of a stream, one after another, read as what the model saw, but for characters that several tokens share:
there, each shows the piece of the vocabulary that it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Decoder:
    """A vocabulary, with what was decoded before."""

    def __init__(self, tokenizer_file: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_file)
        # Decoders of some vocabularies strip the space in front of a first token. So no token is decoded as the first.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._prefix = self._text(self._before)
        self._known: dict[int, str] = {}
        self._lock = threading.Lock()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        with self._lock:
            for token in set(ids) - self._known.keys():
                self._known[token] = self._one(token)
            return [self._known[token] for token in ids]

    def _one(self, token: int) -> str:
        if token < 0 or (piece := self._tokenizer.id_to_token(token)) is None:
            return f"<{token}?>"
        text = self._text([*self._before, token]).removeprefix(self._prefix)
        return piece if _BROKEN in text or not text else text

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
