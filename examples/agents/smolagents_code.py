"""A CodeAgent of smolagents: a program for `environment.kind: command` (docs/agent-harnesses.md).

The agent's memory appends its tool calls to the policy's message, and writes texts as lists of parts. With
`custom_role_conversions` and `flatten_messages_as_text`, the policy's message stays as it was generated, so that the next
prompt continues its tokens.
`REMOVE_PARAMETER` leaves out `stop`, which training refuses: the policy ends its message by itself.
"""

import json
import os

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool
from smolagents.models import REMOVE_PARAMETER


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


policy = OpenAIModel(
    "policy",
    custom_role_conversions={"tool-call": "user", "tool-response": "user"},
    flatten_messages_as_text=True,
    stop=REMOVE_PARAMETER,
)
with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    question = json.load(file)["question"]
agent = CodeAgent(tools=[multiply], model=policy, max_steps=8, verbosity_level=LogLevel.OFF)
print(agent.run(question))
