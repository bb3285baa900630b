"""NeMo Gym's configuration and processes: a configuration is resolved, its servers are started, watched and ended."""
