"""The audit: what became of each scheduled message."""
