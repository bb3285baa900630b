"""NeMo Gym: its configuration, files, servers and clients."""
