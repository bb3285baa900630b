"""SQL over the data of a store's runs: the valid files (`parts`), and their tables, read by an isolated DuckDB
(`database`)."""
