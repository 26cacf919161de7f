"""Handlers of consumers' requests: pulls, offsets, group membership."""
