"""State of a run: errors and reactions. Imports no Prefect. Work in flight: `roundhouse.activity`.

policy      kinds of failure, and the run's reaction        docs/failures.md errors      the errors of the last minutes,
their severity, and alerts heartbeat   a small record of this in the run's directory, for a person
"""
