"""Ways for weights to travel from a checkpoint into an engine.

ways.py           what a wish says of the way; how a replica brings the weights to its node
cache.py          a node's cache of weights
ranged.py         objects read in ranges, in parallel
retype.py         weights in the number format that the engine holds
delta.py          what changed from one version to the next
adapter.py        a base and an adapter, merged
tensor_digest.py  the proof that two places hold the same tensors
"""
