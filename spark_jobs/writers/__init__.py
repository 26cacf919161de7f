"""Offline writing of a store's files from arrays: commitlog, consume queues, index, timer log and wheel.

A broker reads nothing here before it is whole: see `place`.
"""
