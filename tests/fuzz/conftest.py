"""How many cases: some hundreds in all in `make test`; `python -m tests.fuzz` has far more."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("TTP_TEST_FUZZ_CASES", "30"))

settings.register_profile(
    "fuzz", max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)
