"""Collection while training runs (`asynchrony.staleness` above 0): the controller, and the runners that do what it admits.

Removable: a synchronous run imports nothing of it, nor `roundhouse.stages.prefetch` and `flows.generation`, which use it.
"""
