import verifiers.v1 as vf

SHELVES = {"bolts": "C3", "nails": "A1", "hinges": "B2", "screws": "D4"}
PRICES = {"C3": "7", "A1": "2", "B2": "9", "D4": "5"}


class ShopTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def shelf_of(self, good: str) -> str:
        """Name the shelf of a product."""
        return SHELVES.get(good, "unknown")

    @vf.tool
    def price_at(self, shelf: str) -> str:
        """Name the price at a shelf."""
        return PRICES.get(shelf, "unknown")


class ShopData(vf.TaskData):
    good: str


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [ShopTools(config.tools)]

    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        return float(PRICES[SHELVES[self.data.good]] in (trace.last_reply or ""))

    @vf.reward(weight=0.2)
    async def used(self, trace: vf.Trace) -> float:
        return min(sum(len(each.tool_calls or ()) for each in trace.assistant_messages), 2) / 2


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> list[ShopTask]:
        return [ShopTask(ShopData(prompt=f"What do {each} cost?", good=each), self.config.task) for each in SHELVES]


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopTools.run()
