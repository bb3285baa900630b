"""Programs for the interpreter of NeMo Gym's environment: they answer in its own words. No import of Roundhouse.

python nemo_gym_peer.py statistics          stdin {"rows", "inputs", "rollouts"} -> its aggregate metrics and reward profile
python nemo_gym_peer.py verifiers PORT NAME…   serve its resources servers, each under /<name>
python nemo_gym_peer.py conformance         stdin {"url", "seed"} -> its session test against the server at the URL
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def statistics() -> None:
    from nemo_gym.reward_profile import (
        RewardProfiler,
        compute_aggregate_metrics,
        coverage_by_agent,
        select_measured,
    )

    given = json.load(sys.stdin)
    aggregate = compute_aggregate_metrics(given["rows"]).model_dump()
    profiler = RewardProfiler()
    measured = select_measured(given["inputs"], given["rollouts"])
    groups, agents, repeats = profiler.profile_from_data(measured[0], measured[1])
    coverage = coverage_by_agent(given["inputs"], given["rollouts"])
    for entry in agents:
        entry.update(coverage.pop(entry["agent_ref"]["name"], {}))
    agents += [{"agent_ref": {"name": name}, **own} for name, own in coverage.items()]
    profile = [profiler.prepare_for_serialization(part) for part in (groups, agents, repeats)]
    print(json.dumps({"aggregate": aggregate, "profile": profile}, default=float))


def resources_server(name: str) -> Any:
    """One of its resources servers, with the fields of its shipped configuration."""
    import nemo_gym
    from nemo_gym.base_resources_server import SimpleResourcesServer
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    module = importlib.import_module(f"resources_servers.{name}.app")
    folder = Path(nemo_gym.__file__).parent.parent / "resources_servers" / name
    fields: dict[str, Any] = {}
    for path in sorted((folder / "configs").glob("*.yaml")):
        for block in OmegaConf.to_container(OmegaConf.load(path)).values():
            fields = fields or (block.get("resources_servers") or {}).get(name) or {}
    [kind] = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, SimpleResourcesServer) and one.__module__ == module.__name__
    ]
    config = kind.model_fields["config"].annotation(**{**fields, "name": name, "host": "127.0.0.1", "port": 1})
    return kind(config=config, server_client=MagicMock(spec=ServerClient))


def verifiers(port: int, names: list[str]) -> None:
    import uvicorn
    from fastapi import FastAPI

    app, missing = FastAPI(), {}
    for name in names:
        try:
            app.mount(f"/{name}", resources_server(name).setup_webserver())
        except (ImportError, OSError, LookupError, ValueError) as error:  # a package or a file that the wheel lacks
            missing[name] = repr(error)[:200]

    @app.get("/missing")
    def told() -> dict[str, str]:
        return missing

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def conformance() -> None:
    import httpx
    from fastapi import FastAPI, Request, Response
    from nemo_gym.base_resources_server import ResourcesSeedSessionRequest
    from nemo_gym.testing.session_conformance import check_resources_session_contract

    given = json.load(sys.stdin)
    app = FastAPI()

    @app.post("/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        headers = {"content-type": "application/json", "cookie": request.headers.get("cookie", "")}
        async with httpx.AsyncClient(base_url=given["url"]) as client:
            reply = await client.post(f"/{path}", content=await request.body(), headers=headers)
        return Response(reply.content, reply.status_code, {"set-cookie": reply.headers["set-cookie"]})

    seed = ResourcesSeedSessionRequest.model_validate(given["seed"])
    check_resources_session_contract(app, seed, keeps_state=given["keeps_state"])
    print("conforms")


if __name__ == "__main__":
    if sys.argv[1] == "verifiers":
        verifiers(int(sys.argv[2]), sys.argv[3:])
    else:
        {"statistics": statistics, "conformance": conformance}[sys.argv[1]]()
