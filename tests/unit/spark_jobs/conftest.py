"""Hypothesis without deadlines: the first calls of numpy's and pyarrow's functions take longer than all others."""

from hypothesis import settings

settings.register_profile("spark_jobs", settings.default, deadline=None)
settings.load_profile("spark_jobs")
