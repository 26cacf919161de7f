"""Handlers of what is asked about messages that wait: lists, changes, recalls."""
