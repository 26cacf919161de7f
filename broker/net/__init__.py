"""Connections, and how requests come to their handlers and answers to their clients."""
