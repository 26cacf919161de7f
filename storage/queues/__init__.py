"""Consume queues and index files, which are derived from the commitlog."""
