from roundhouse.environments.base import tool
from roundhouse.plugins.nexrl import AgentRolloutWorker


class QuizWorker(AgentRolloutWorker):
    """Looks up capitals before it answers; with `final_only`, only the final text is trained on."""

    def __init__(self, llm, evaluator=None, final_only: bool = False):
        super().__init__(llm, evaluator)
        self.final_only = final_only

    def format_task_query(self, item):
        return f"{item['question']} Answer in one word."

    @tool("The capital of a country.", country="Its name.")
    async def capital(self, task, country: str) -> str:
        return task["atlas"].get(country, "unknown")

    def get_train_loss_mask(self, infos):
        return [not (self.final_only and info["tool_calls"]) for info in infos]
