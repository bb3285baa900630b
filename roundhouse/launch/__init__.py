"""Launchers: programs in separate processes, on this machine or others."""
