"""NeMo Gym's collector on the wire, with aiohttp alone: find the agents at the head server, POST the rows, aggregate."""

import json
from typing import Any

import aiohttp
import yaml

TYPES = ("resources_servers", "responses_api_agents", "responses_api_models")


async def configuration(
    http: aiohttp.ClientSession, head: str, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    async with http.get(f"{head}/global_config_dict_yaml", headers=headers) as reply:
        assert reply.status == 200
        return yaml.safe_load(json.loads(await reply.read()))


def base_url(tree: dict[str, Any], name: str) -> str:
    """The first field block three levels down, as its clients find it."""
    fields = next(iter(next(iter(tree[name].values())).values()))
    return f"http://{fields['host']}:{fields['port']}"


async def collect(head: str, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The configuration, answers to /run in the rows' order, aggregate metrics; any status but 200 ends it, as there."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
        tree = await configuration(http, head)

        async def post(name: str, path: str, body: Any) -> Any:
            async with http.post(base_url(tree, name) + path, json=body) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.json()

        results = [await post(row["agent_ref"]["name"], "/run", row) for row in rows]
        counted = [
            {key: value for key, value in result.items() if key not in ("response", "responses_create_params")}
            | {"response": {"usage": result["response"]["usage"]}, "_ng_task_index": row["_ng_task_index"]}
            for row, result in zip(rows, results, strict=True)
            if "_ng_failure_class" not in result
        ]
        metrics = await post(rows[0]["agent_ref"]["name"], "/aggregate_metrics", {"verify_responses": counted})
    return tree, results, metrics
