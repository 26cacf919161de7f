"""Apache Kafka as a rival in the benchmarks: its broker and a Python client."""
