"""The evaluation runner of verifiers by itself, as JSON: `python verifiers_peer.py BLOCKS`, in its own interpreter.

BLOCKS is {name: {"env": {…}, "tasks": 12, "base_url": "http://…/v1"}}. The output has the rewards of each task in order. The
functions below give the stored replies, for the endpoint of the runner and for the policy of the test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = ("print('OLLEH')", "print(0, 1, 1, 2, 3, 5, 8, 13, 21, 34)", "print(sum(range(101)))", "raise SystemExit(1)")


def number_of(messages: list[dict[str, Any]]) -> int:
    """Return a number that depends on the newest message alone."""
    return int(hashlib.sha256(str(messages[-1]["content"]).encode()).hexdigest()[:8], 16)


def reversal(messages: list[dict[str, Any]]) -> str:
    text = messages[-1]["content"][::-1]
    return f"<reversed_text>{text[: 3 + number_of(messages) % len(text)]}</reversed_text>"


def sorting(messages: list[dict[str, Any]]) -> str:
    names: list[str] = []
    for message in messages:
        if message["role"] == "user":
            names += re.search(r"name: (.*)", message["content"]).group(1).split(", ")  # type: ignore[union-attr]
    tag = "combined_alphabetical_sorted" if any(m["role"] == "assistant" for m in messages) else "alphabetical_sorted"
    ranked = sorted(names, reverse=number_of(messages) % 3 == 0)
    return f"<{tag}>\n" + "\n".join(ranked) + f"\n</{tag}>"


def betting(messages: list[dict[str, Any]]) -> str:
    legal = re.findall(r"\[\w+\]", messages[-1]["content"].rpartition("legal actions")[2])
    return f"I choose {[*legal, 'nothing'][number_of(messages) % (len(legal) + 1)]}."


def golf(messages: list[dict[str, Any]]) -> str:
    return f"```python\n{PROGRAMS[number_of(messages) % len(PROGRAMS)]}\n```"


def scratchpad(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    if number_of(messages) % 3 == 0:
        return "I would rather not."
    word = re.search(r'word="(\w+)"', messages[-1]["content"]).group(1)  # type: ignore[union-attr]
    return {"name": "scratchpad_roundtrip", "arguments": json.dumps({"word": word})}


REPLIES = {
    "reverse_text": reversal,
    "alphabet_sort": sorting,
    "kuhn_poker": betting,
    "code_golf": golf,
    "scratchpad": scratchpad,
}


def message_for(name: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stored reply of a task set to a conversation, as an assistant message."""
    reply = REPLIES[name](messages)
    if isinstance(reply, str):
        return {"role": "assistant", "content": reply}
    call = {"id": f"call_{number_of(messages):x}", "type": "function", "function": reply}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(name: str, body: dict[str, Any]) -> tuple[str, bytes]:
    """Return type and body of the answer of the endpoint of a task set: JSON, or events if the request asks for a stream."""
    message = message_for(name, body["messages"])
    finish = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "reply", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return "application/json", json.dumps(answer | {"choices": [choice]}).encode()
    parts = [{**call, "index": number} for number, call in enumerate(message.get("tool_calls", []))]
    delta = message | ({"tool_calls": parts} if parts else {})
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    event = answer | {"object": "chat.completion.chunk", "choices": [choice]}
    return "text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()


async def evaluated(name: str, block: dict[str, Any], folder: str) -> list[float | None]:
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    keys = {
        "env": block["env"],
        "client": {"base_url": block["base_url"], "api_key_var": "NO_KEY"},
        "model": "policy",
        "select": {"limit": block["tasks"]},
        "push": False,
        "rich": None,
        "output_dir": f"{folder}/{name}",
    }
    episodes = await run_eval(EvalConfig.model_validate(keys))
    episodes.sort(key=lambda episode: episode.task.data.idx)
    return [seat_of_the_policy(episode).reward if episode.ok else None for episode in episodes]


def seat_of_the_policy(episode: Any) -> Any:
    """Return the trace of the seat; traces are in the order of their ends."""
    [trace] = [each for each in episode.traces if each.agent.name in ("agent", "golfer", "player0")]
    return trace


async def rewards_of(blocks: dict[str, Any]) -> dict[str, list[float | None]]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: await evaluated(name, block, folder) for name, block in blocks.items()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(rewards_of(json.loads(sys.argv[1])))))
