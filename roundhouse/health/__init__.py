"""How a run is doing: what is in flight, what went wrong, what to do about it. Imports no Prefect.

taxonomy    what kind of failure an error is                      docs/failures.md
policy      what a run does after a failed iteration
activity    what is in flight, since when, and whether it moves
watchdog    ends a stage in which nothing moves
errors      the errors of the last minutes, and how bad that is
heartbeat   all of it as a small record beside the run, for a person
"""
