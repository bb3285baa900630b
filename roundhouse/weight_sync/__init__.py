"""From a checkpoint into the engine: weight transports, and the proof that replicas hold what was published.

base.py               what a transport is; how a replica fetches weights; the transport by the checkpoint's own files
delta.py, adapter.py, shared_memory.py, transfer.py      one transport each
replica_state.py      what a replica is to hold, what it reports, and that all replicas hold the same
cache.py, checkpoint_files.py, tensor_files.py      weights on a node
"""
