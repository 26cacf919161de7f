"""Compaction: makes a store without records that will never be read again."""
