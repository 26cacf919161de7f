"""What proves the Spark jobs: stores of real brokers, faults put into them, and a reader of its own to compare with."""
