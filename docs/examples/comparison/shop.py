import roundhouse as rh

SHELVES = {"bolts": "C3", "nails": "A1", "hinges": "B2", "screws": "D4"}
PRICES = {"C3": "7", "A1": "2", "B2": "9", "D4": "5"}


class Shop(rh.Environment):
    name = "shop"

    def tasks(self, split):
        goods = ["screws"] if split == "heldout" else ["bolts", "nails", "hinges"]
        return [
            rh.task_row(f"What do {each} cost?", task_id=each, tools=self.tool_schemas(), good=each) for each in goods
        ]

    @rh.tool("Name the shelf of a product.", good="The product.")
    async def shelf_of(self, session, good: str) -> str:
        return SHELVES.get(good, "unknown")

    @rh.tool("Name the price at a shelf.", shelf="The shelf.")
    async def price_at(self, session, shelf: str) -> str:
        return PRICES.get(shelf, "unknown")

    def verify(self, session, row, response):
        calls = sum(item["type"] == "function_call" for item in response["output"])
        return 0.1 * min(calls, 2) + 0.8 * (PRICES[SHELVES[row["good"]]] in rh.final_text(response))
