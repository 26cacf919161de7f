"""Timers: messages for any time, in a wheel of seconds."""
