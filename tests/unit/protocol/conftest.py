from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machine that runs these may be busy: how long an example takes says nothing.
settings.register_profile("wire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wire")
