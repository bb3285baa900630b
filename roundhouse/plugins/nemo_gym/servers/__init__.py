"""Servers of NeMo Gym's contracts."""
