"""Each place of an SGLang server's reply, replaced by another type."""

import pytest

from roundhouse.plugins.sglang.engine import SGLangEngine
from tests.security.mutants import CALLS, attack

META = {
    "finish_reason": {"type": "stop"},
    "weight_version": "default",
    "output_token_logprobs": [[-0.5, 3, None], [-0.5, 4, None]],
    "input_token_logprobs": [[None, 0, None], [-0.1, 1, None]],
}
ROUTES = {
    "/generate": {"meta_info": META},
    "/update_weights_from_disk": {"success": True},
    "/get_model_info": {"model_path": "/m", "weight_version": "default"},
}


@pytest.mark.parametrize("call", CALLS)
async def test_no_reply_of_sglang_is_a_defect_or_an_invented_token(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await attack(SGLangEngine, {"kind": "sglang", "weight_update": "sglang"}, ROUTES, call, monkeypatch)
