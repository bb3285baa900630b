"""Foreign worlds, each removable: nothing outside imports them except by the kind that a configuration names."""
