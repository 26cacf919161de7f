"""Handlers of what consumers ask: pulls, offsets, their groups."""
