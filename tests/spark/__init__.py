"""The tests of the Spark jobs: stores of real brokers, faults put into them, and an independent reader to compare
with."""
