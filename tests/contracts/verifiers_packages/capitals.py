"""A task set of verifiers with one turn, whose harness calls the model in the process of verifiers.

The harness serves other task sets too: `harness: {id: capitals}`.
"""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Nowhere": "None"}


class CapitalsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt]
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            body = {"model": ctx.model, "messages": messages}
            reply = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return vf.ProgramResult(exit_code=int(reply.is_error), stdout="", stderr=reply.text)


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "None":
            raise ValueError("there is no such country")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class CapitalsConfig(vf.TasksetConfig):
    endless: bool = False


class CapitalsTaskset(vf.Taskset[CapitalTask, CapitalsConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> list[CapitalTask]:
        return [
            CapitalTask(CapitalData(prompt=f"The capital of {country}?", system_prompt="Answer.", answer=capital))
            for country, capital in CAPITALS.items()
        ]


__all__ = ["CapitalsHarness", "CapitalsTaskset"]
