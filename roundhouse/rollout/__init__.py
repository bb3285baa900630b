"""The rollout engine: one attempt at one task, its agent loops, the replay of recorded calls, and many rollouts at once."""
