"""Offline jobs over the files of a store, of duemq or RocketMQ: a table source for Spark, audit, compact, archive,
analyse, forecast, report.

Nothing here connects to a running broker. Code for Spark's tasks imports numpy, pyarrow and the broker's formats.
"""
