"""Compaction: a store without what nobody can read again."""
