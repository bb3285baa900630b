"""Clients of NeMo Gym's servers."""
