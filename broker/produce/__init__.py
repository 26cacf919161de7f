"""Handlers of producers' sends, and of messages that consumers send back."""
