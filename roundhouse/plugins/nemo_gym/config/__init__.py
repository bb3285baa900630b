"""NeMo Gym's configuration: reading, merging and resolving it."""
