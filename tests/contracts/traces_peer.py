"""Saved traces of verifiers, in its own interpreter: `traces_peer.py BASE_URL DIRECTORY`.

`DIRECTORY/run/…/traces.jsonl` is that of its evaluation runner, `DIRECTORY/tokens/traces.jsonl` the same episodes with token
IDs, as its clients for training record them.
"""

import asyncio
import json
import sys
from pathlib import Path

from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.trace_store import write_episode

LIGHT = {"harness": {"id": "capitals"}, "runtime": {"type": "subprocess"}}


async def main(base_url: str, directory: Path) -> None:
    keys = {
        "env": {"taskset": {"id": "capitals"}, "agent": LIGHT},
        "client": {"base_url": base_url, "api_key_var": "NO_KEY"},
        "model": "policy",
        "num_rollouts": 2,
        "push": False,
        "rich": None,
        "output_dir": str(directory / "run"),
    }
    episodes = await run_eval(EvalConfig.model_validate(keys))
    (directory / "tokens").mkdir()
    rewards = []
    for episode in episodes:
        rewards.append(sum(trace.reward for trace in episode.traces) if episode.ok else None)
        for trace in episode.traces:
            for number, node in enumerate(trace.nodes):
                node.token_ids = [10 + number, 20 + number, 30 + number]
                node.mask = [False, node.sampled, node.sampled]
                node.logprobs = [-0.123456, -0.5] if node.sampled else []
        write_episode(directory / "tokens", episode)
    (directory / "rewards.json").write_text(json.dumps(rewards))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
