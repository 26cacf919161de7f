"""Offline jobs over the files of a store, duemq's or RocketMQ's: a table source for Spark, audit, compact, archive,
analyse, forecast, report.

Nothing here speaks to a running broker. What runs in Spark's tasks imports numpy, pyarrow and `protocol`'s constants.
"""
