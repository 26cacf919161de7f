"""Durations, times, settings and checks of what callers hand in."""
