"""Hypothesis without deadlines: the first call of numpy's and pyarrow's functions takes longer than all others."""

from hypothesis import settings

settings.register_profile("spark_jobs", settings.default, deadline=None)
settings.load_profile("spark_jobs")
