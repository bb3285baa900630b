"""Follow-ups of environments with tools on an OpenEnv server."""

from __future__ import annotations

import aiohttp
import pytest

from tests.gym.insistent import Insistent
from tests.plugins.openenv.test_server import serving, told


@pytest.mark.real
async def test_an_openenv_server_has_the_same_follow_ups() -> None:
    with serving(Insistent()) as urls:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{urls['insistent']}/ws") as socket:
            await told(socket, {"type": "reset"})
            reply = (await told(socket, {"type": "step", "data": {"text": "None."}}))["data"]
            assert (reply["observation"]["text"], reply["done"]) == ("None. But it is 0.", False)
            call = {"type": "call_tool", "tool_name": "add", "arguments": {"n": 3}}
            await told(socket, {"type": "step", "data": call})
            end = (await told(socket, {"type": "step", "data": {"text": "Three."}}))["data"]
            assert (end["reward"], end["done"]) == (1.0, True)
