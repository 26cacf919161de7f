"""A store's files as the jobs read them, on a disk or elsewhere."""
