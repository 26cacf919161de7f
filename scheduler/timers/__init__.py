"""Timers: messages with an arbitrary deliver time, in a wheel of seconds."""
