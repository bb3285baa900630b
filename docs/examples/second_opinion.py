"""An agent that asks a sub-agent before it answers: a program for `environment.kind: command` (docs/agents.md).

It knows nothing of Roundhouse: the SDK reads OPENAI_BASE_URL and OPENAI_API_KEY. The main conversation asks, a sub-agent with
messages of its own judges the draft, and the main conversation continues. Both conversations are trained on.
"""

import json
import os
from typing import Any

from openai import OpenAI

client = OpenAI()


def ask(messages: list[Any]) -> str:
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages.append(reply)
    return reply.content or ""


with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    task = json.load(file)
main: list[Any] = [{"role": "user", "content": task["question"]}]
draft = ask(main)
opinion = ask(
    [
        {"role": "system", "content": "You check what others calculate."},
        {"role": "user", "content": f"{task['question']} Somebody says: {draft}"},
    ]
)
main.append({"role": "user", "content": f"Somebody else says: {opinion} What is your last word?"})
right = task["answer"] in ask(main)
with open(os.environ["ROUNDHOUSE_RESULT"], "w") as file:
    json.dump({"reward": float(right)}, file)
