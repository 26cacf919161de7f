from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machine that runs these may be busy: the duration of an example proves nothing.
settings.register_profile("wire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wire")
