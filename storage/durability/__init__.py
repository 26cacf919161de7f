"""Durability: flushes, checkpoints, recovery and retention, with one owner."""
