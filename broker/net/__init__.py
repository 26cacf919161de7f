"""Connections, and the paths of requests to their handlers and of answers to their clients."""
