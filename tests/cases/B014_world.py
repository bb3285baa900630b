"""B014, B043, B044: demonstrations with misplaced or malformed calls in their text."""

from roundhouse.environments.base import Verdict, closing_text, tool
from roundhouse.environments.calculator import Calculator

GOOD = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXT = {
    "plain": GOOD,
    "thought": f"<think>Shall I write {GOOD.replace('now', 'delete')}? No.</think>\n{GOOD}",
    "mention": "<think>I must write the <tool_call> tag.</think>\n" + GOOD,
    "broken": GOOD + '\n<tool_call>\n{"name": "now", "arguments": {"zone": }}\n</tool_call>',
    "bare": '<tool_call>\n{"name": "now"}\n</tool_call>',
}
REPORT = {
    "role": "tool",
    "tool_call_id": "call_2",
    "content": '{"error":"Invalid tool call arguments: Expecting value: line 2 column 39 (char 39)"}',
}
"""The policy learns to read it, as it learns to read the tool's answer."""


class World(Calculator):
    """Ask `now`, which returns noon, and answer `Noon.`; `delete` may never be called."""

    def __init__(self, how: str = "thought", **kw):
        super().__init__(**kw)
        self.how = how

    @tool("The time.")
    async def now(self, session) -> str:
        session.calls += 1
        return "noon"

    @tool("Deletes everything.")
    async def delete(self, session) -> str:
        session.errors += 1
        return "all is gone"

    async def verify(self, session, row, response):
        right = (closing_text(response) or "").strip().endswith("Noon.") and session.calls > 0 and not session.errors
        return Verdict(reward=float(right), metrics={"asked": float(session.calls), "deleted": float(session.errors)})

    def demonstrations(self, split, count, good_fraction, seed):
        said = []
        for n in range(count):
            row = self.tasks(split)[n % 40]
            asked = row["responses_create_params"]["input"]
            question = asked if isinstance(asked, str) else asked[-1]["content"]
            said.append(
                [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": TEXT[self.how]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
                    *([REPORT] if self.how == "broken" else []),
                    {"role": "assistant", "content": "Noon."},
                ]
            )
        return said
