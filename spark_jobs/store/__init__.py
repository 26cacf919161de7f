"""A store's files as the jobs read them, on a local disk or elsewhere."""
