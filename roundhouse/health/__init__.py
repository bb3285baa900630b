"""How a run is doing: what went wrong, what to do about it. Imports no Prefect. What is in flight: `roundhouse.activity`.

policy      kinds of failure, and what a run does after one        docs/failures.md
errors      the errors of the last minutes, how bad that is, and alerts
heartbeat   all of it as a small record beside the run, for a person
"""
