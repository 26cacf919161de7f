"""Handlers of administration requests, and the figures that they report."""
