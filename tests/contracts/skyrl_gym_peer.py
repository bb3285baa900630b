"""Episodes of skyrl-gym by itself, as JSON: `python skyrl_gym_peer.py CASES`, in its own interpreter.

CASES is [{"row": {…}, "config": {…}, "replies": […]}]. The output has the rewards and the end of each step.
"""

import json
import sys
from types import SimpleNamespace

import skyrl_gym


def play(case: dict) -> list[list]:
    extras = {name: value for name, value in case["row"].items() if name != "prompt"}
    env = skyrl_gym.make(case["row"]["env_class"], env_config=SimpleNamespace(**case["config"]), extras=extras)
    env.init(case["row"]["prompt"])
    steps = []
    for reply in case["replies"]:
        output = env.step(reply)
        steps.append([float(output["reward"]), output["done"]])
        if output["done"]:
            break
    return steps


if __name__ == "__main__":
    json.dump([play(case) for case in json.loads(sys.argv[1])], sys.stdout)
