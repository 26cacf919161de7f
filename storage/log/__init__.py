"""The commitlog: its files, the one appender, and the readers of its records."""
