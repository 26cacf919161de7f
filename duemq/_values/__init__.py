"""Durations, times, intervals, and checks of arguments."""
