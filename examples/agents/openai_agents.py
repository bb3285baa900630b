"""An agent of the OpenAI Agents SDK: a program for `environment.kind: command` (docs/agent-harnesses.md).

The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY. The first argument is the dialect: `responses` or `chat_completions`.
"""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions" if "chat_completions" in sys.argv else "responses")
set_tracing_disabled(True)  # traces are sent to OpenAI otherwise


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    question = json.load(file)["question"]
agent = Agent(name="calculator", instructions="Multiply with the tool.", tools=[multiply], model="policy")
print(Runner.run_sync(agent, question, max_turns=8).final_output)
