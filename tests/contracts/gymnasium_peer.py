"""Episodes of gymnasium by itself, as JSON: `python gymnasium_peer.py CASES`, in its own interpreter.

CASES is [{"id": "…", "options": {…}, "seed": 3, "actions": […]}]. The output has observation, reward and ends of each step.
"""

import json
import sys

import gymnasium


def play(case: dict) -> list[list]:
    env = gymnasium.make(case["id"], **case["options"])
    env.reset(seed=case["seed"])
    steps = []
    for number in case["actions"]:
        action = env.action_space.from_jsonable([number])[0]
        _, reward, terminated, truncated, _ = env.step(action)
        steps.append([float(reward), bool(terminated), bool(truncated)])
        if terminated or truncated:
            break
    return steps


if __name__ == "__main__":
    json.dump([play(case) for case in json.loads(sys.argv[1])], sys.stdout)
