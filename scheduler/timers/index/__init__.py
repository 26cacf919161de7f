"""Indexes of waiting messages, kept in memory: by key, id, topic and second."""
