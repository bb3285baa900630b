"""Collection of rollouts: by one process or in shards, before training or concurrently with it."""
