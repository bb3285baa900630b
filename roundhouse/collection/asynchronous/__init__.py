"""Collection during training (`asynchrony.staleness` above 0): its plan, the controller's journal, the two loops.

Removable: a synchronous run imports neither this package nor its users `roundhouse.stages.prefetch` and
`roundhouse_flows.generation`.
"""
