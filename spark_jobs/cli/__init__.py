"""`duemq spark`: the command line of the jobs."""
