"""Handlers of what producers send, and of what consumers send back."""
