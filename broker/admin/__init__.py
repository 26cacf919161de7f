"""Handlers of administration, and what they tell of the broker."""
