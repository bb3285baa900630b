"""SQL over what the runs of a store have written: which files count (`parts`), as which tables (`tables`), read by a DuckDB
that can reach nothing else (`database`)."""
