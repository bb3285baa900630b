"""A loop of tool calls with Anthropic's SDK: a program for `environment.kind: command` (docs/agent-harnesses.md).

The SDK reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
"""

import json
import os
from typing import Any

from anthropic import Anthropic

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
MULTIPLY: Any = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
}

with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    messages: list[Any] = [{"role": "user", "content": json.load(file)["question"]}]
client = Anthropic()
while True:
    reply = client.messages.create(model="policy", max_tokens=512, messages=messages, tools=[MULTIPLY])
    messages.append({"role": "assistant", "content": reply.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] * block.input["b"])}
        for block in reply.content
        if block.type == "tool_use"
    ]
    if not results:
        break
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
