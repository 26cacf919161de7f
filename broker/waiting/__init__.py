"""Handlers of requests about waiting messages: lists, changes, recalls."""
