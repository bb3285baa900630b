"""The real controller and pool in virtual time, with an engine and a trainer that only take time."""
