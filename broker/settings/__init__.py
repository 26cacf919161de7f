"""Settings: what they are, where they come from, and how they change while the broker runs."""
