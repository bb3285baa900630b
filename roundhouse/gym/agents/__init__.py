"""Agents: what plays a rollout, one module a protocol. `roundhouse.gym.agent.run_rollout` is the border around them."""
