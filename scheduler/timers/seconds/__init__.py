"""The seconds of the wheel at work: units are put into their slots, and read from the timer log when their turn comes;
messages of paused topics are parked."""
