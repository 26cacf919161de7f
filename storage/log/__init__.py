"""The commitlog: its files, the one appender, and what reads records from it."""
