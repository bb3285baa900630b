"""From a checkpoint into the engine: weight transports, and the proof that replicas hold the published weights.

- `base.py`: the transport interface, how a replica fetches weights, and the transport by the checkpoint's own files
- `sending.py`: the agreement between a transport and a trainer that sends its weights
- `replica_state.py`: a replica's desired state, its report, and the agreement of all replicas
- `cache.py`, `checkpoint_files.py`, `tensor_files.py`: weights on a node
"""
