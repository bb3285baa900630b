"""What works around Prefect. Each module says which behaviour it meets, and in which version it was seen."""
