"""Writing the files of a store, offline, from arrays: commitlog, consume queues, index, timer log and wheel.

Nothing here is read by a broker before it is whole: see `place`.
"""
