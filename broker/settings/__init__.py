"""Settings: their definitions, their sources, and their changes while the broker runs."""
