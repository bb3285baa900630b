"""SQL over what the runs of a store have written: which files count (`parts`), and their tables, read by a DuckDB that can
reach nothing else (`database`)."""
