"""An agent of several turns: the policy calls the worker's tools until it answers without a call.

Invariant: whatever the policy calls, the answer is a text it can be shown (as of an `Environment`'s tools); a limit of turns or
tokens ends the run, and what there is by then is judged as truncated.

    class Librarian(AgentRolloutWorker):
        @tool("Look a word up.", word="The word.")
        async def define(self, task, word: str) -> str:
            return task["dictionary"].get(word, "unknown")
"""

from __future__ import annotations

from typing import Any

import orjson

from roundhouse.compat.nexrl.evaluation import AnswerTag
from roundhouse.compat.nexrl.llm import RolloutLimit
from roundhouse.compat.nexrl.worker import BaseRolloutWorker
from roundhouse.environments.base import Tool, marked_tools
from roundhouse.environments.tools import Toolbox, invalid_arguments
from roundhouse.rollout.responses import chat_tools, tool_message


class AgentRolloutWorker(BaseRolloutWorker):
    """Tools are methods marked with `roundhouse.environments.base.tool`; in the place of the session they get the task."""

    evaluator = AnswerTag()

    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return marked_tools(self)

    def first_messages(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The conversation to begin with: the query as a user message."""
        return [{"role": "user", "content": self.format_task_query(task)}]

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        toolbox = Toolbox(self)
        tools = chat_tools([tool.schema() for tool in self.tools().values()])
        messages = self.first_messages(task)
        answer = ""
        while True:
            try:
                told = await self.llm.generate(messages, tools)
            except RolloutLimit as limit:
                return await self.cut_short(task, str(limit))
            answer = told["response"]
            if self.llm.limit or not told["tool_calls"]:
                return await self.put_trajectory(task, answer)
            messages.append(told["message"])
            for call in told["tool_calls"]:
                messages.append(tool_message(call["id"], await _answer(toolbox, task, call["function"])))


async def _answer(toolbox: Toolbox, task: dict[str, Any], function: dict[str, Any]) -> str:
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError as error:
        return invalid_arguments(error).text
    return (await toolbox.call(task, function["name"], arguments)).text
