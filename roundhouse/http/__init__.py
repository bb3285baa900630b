"""One kit for every server: limits on bodies, checks of Host and Origin, sessions, metrics."""
