"""What all tests are run with."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that others use is slow, and no test is about time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
