"""The audit: the outcome of each scheduled message."""
