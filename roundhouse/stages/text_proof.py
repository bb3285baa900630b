"""The proof that text and tokens agree: what the policy is said to have said is what its token IDs decode to.

Invariant: text is compared exactly, and tool calls by name and parsed arguments; a rollout is refused only when its record
contradicts its tokens. Its model calls are read from the tokens as the engine read them
(`roundhouse.generation.chat.message_of`), and its recorded items by their order, so no id or position is trusted.

    tokens  [.. 41, 7, 2]  ->  "The answer is 17."   ->  message(The answer is 17.)
    record  message(The answer is 18.)                   refused: text_mismatch
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.generation.chat import TOOL_CALL_START, parse_hermes
from roundhouse.rollout.responses import assistant_items
from roundhouse.trajectories.proofs import Refusal
from roundhouse.trajectories.records import Rollout, Turn

Said = tuple[str, Any]
"""One thing that a policy said: ("message", text), ("reasoning", [texts]) or ("call", (name, arguments))."""


class DecodedText:
    """`TextProof` from the files of a tokenizer: tokenizer.json beside config.json, generation_config.json.

    It reads the files with `tokenizers` alone: validation needs no torch and no transformers.

    Args:
        hermes: tool calls are written in Hermes' notation, the one that can be read here. Without it, rollouts with tool
            calls are not judged.

    Raises:
        ConfigError: the directory has no tokenizer.json.
    """

    def __init__(self, directory: Path, *, hermes: bool = True) -> None:
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json, so text cannot be proved. Set validation.check_text to false."
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        named = [name for name in _special_names(directory) if self._tokenizer.token_to_id(name) is not None]
        self._tokenizer.add_special_tokens(named)
        self._stops = _stop_ids(self._tokenizer, directory)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._hermes = hermes

    def prove(self, rollout: Rollout) -> bool:
        """See `TextProof`.

        Raises:
            Refusal: `text_mismatch`.
        """
        recorded = list(_recorded(rollout))
        # Where no call is on record, none was offered or none was parsed: the text stands as it is.
        called = any(kind == "call" for kind, _ in recorded)
        if called and not self._hermes:
            return False
        place = 0
        for turn in rollout.turns:
            for said in self._said(turn, called=called):
                found = recorded[place] if place < len(recorded) else None
                if found != said:
                    raise Refusal(
                        "text_mismatch", f"the tokens say {_short(said)}, the record {_short(found)}", turn.turn
                    )
                place += 1
        if place < len(recorded):
            raise Refusal("text_mismatch", f"no token says {_short(recorded[place])}")
        return True

    def _said(self, turn: Turn, *, called: bool) -> list[Said]:
        ids = turn.generation_token_ids
        if ids[-1] in self._stops:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        message: dict[str, Any] = {"content": text}
        calls: list[dict[str, Any]] = []
        if called and TOOL_CALL_START in text:
            message["content"], calls = parse_hermes(text, [])
        if calls:
            message["tool_calls"] = calls
        elif not self._special.isdisjoint(ids):
            message["content"] = self._tokenizer.decode(ids, skip_special_tokens=True)
        return list(_told(assistant_items(message, "")))


def _recorded(rollout: Rollout) -> Iterable[Said]:
    """What the record says the policy said: its items behind those that the task gave."""
    given = rollout.task.get("responses_create_params", {}).get("input", [])
    return _told(rollout.items[1 if isinstance(given, str) else len(given) :])


def _told(items: list[dict[str, Any]]) -> Iterable[Said]:
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            yield "reasoning", [part["text"] for part in item.get("summary", [])]
        elif kind == "function_call":
            yield "call", (item["name"], _arguments(item["arguments"]))
        elif kind == "message" and item.get("role") == "assistant":
            content = item.get("content") or ""
            yield "message", content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _arguments(text: str) -> str:
    """In one spelling, also of what equals nothing (NaN)."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


def _short(said: Said | None) -> str:
    return "nothing" if said is None else f"{said[0]} {said[1]!r}"[:200]


def _special_names(directory: Path) -> set[str]:
    """Tokens that tokenizer_config.json makes special, as transformers does when it loads the tokenizer."""
    config = _json(directory / "tokenizer_config.json")
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    tokens = [config.get(f"{role}_token") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    tokens += listed if isinstance(listed, list) else list(listed.values())
    return {str(token["content"] if isinstance(token, dict) else token) for token in tokens if token}


def _stop_ids(tokenizer: Any, directory: Path) -> frozenset[int]:
    """IDs that end an answer, as `roundhouse.generation.chat.stop_token_ids` finds them."""
    ids: set[int] = set()
    token = _json(directory / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and (known := tokenizer.token_to_id(name)) is not None:
        ids.add(known)
    ends = _json(directory / "generation_config.json").get("eos_token_id")
    ids.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return frozenset(ids)


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found
