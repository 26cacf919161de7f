"""Brokers under test as processes: duemq's and Apache's, with one interface."""
