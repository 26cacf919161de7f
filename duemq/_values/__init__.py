"""Values that the client's parts share: durations, times, intervals, keys, and checks of arguments."""
