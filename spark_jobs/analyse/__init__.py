"""The nightly analysis: lateness, forecast, usage, and comparison of nights."""
