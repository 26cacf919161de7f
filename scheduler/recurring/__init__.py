"""Recurring messages: when they are delivered next, and the records for that."""
