"""The nightly analysis: lateness, forecast, usage, and the nights beside each other."""
