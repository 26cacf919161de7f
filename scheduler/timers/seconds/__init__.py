"""The seconds of the wheel at work: units put into them, read from the timer log when they come, and those of paused
topics."""
