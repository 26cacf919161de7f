"""Offline writing of a store's files from arrays: commitlog, consume queues, index, timer log and wheel.

No broker reads a directory before it is whole: see `new_directory`.
"""
