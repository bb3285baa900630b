"""A Serve application that returns the environment of a replica."""

from __future__ import annotations

import os
from pathlib import Path

from ray import serve
from starlette.requests import Request

import roundhouse


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Echo:
    async def __call__(self, request: Request) -> dict[str, str]:
        return {
            "roundhouse": str(Path(roundhouse.__file__).parent),
            "endpoint": os.environ.get("AWS_ENDPOINT_URL", ""),
            "no_proxy": os.environ.get("NO_PROXY", ""),
        }


app = Echo.bind()
