"""The flows. Prefect is imported here without pandas, which it wants for cache keys of data frames: no task here has either."""

from roundhouse.spared_imports import spared

with spared("pandas"):
    import prefect.cache_policies  # noqa: F401
