"""What each stage does, as plain functions over the library; `tasks/` wraps them for Prefect.

Every function here takes a `Run` and references, commits to the store and returns a `Reference`. Called again on a
complete stage it returns the same reference and does nothing.
"""
