"""What collection while training runs (`asynchrony.staleness` above 0) adds: its plan, the controller's journal, the two loops.

Removable: a synchronous run imports nothing of it, nor `roundhouse.stages.prefetch` and `flows.generation`, which use it.
"""
