"""Indexes of what waits, kept in memory: by key, id, topic and second."""
