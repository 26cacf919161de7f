"""What is on the disk: flushes, checkpoints, recovery and retention, with one owner."""
