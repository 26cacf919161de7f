"""The files of the timers: timer log, timer wheel, timercheck, timermetrics, and the checkpoint's note."""
