"""What every controller of a job receives, the standbys included."""

from __future__ import annotations

from ttp.config import Settings
from ttp.controller.__main__ import parse
from ttp.proto.hang_limits import HangLimits
from ttp.runtime.standby import controller_options


def test_every_controller_judges_hangs_by_the_jobs_own_settings() -> None:
    """The options of the first controller and of the standbys are the same, and the program takes them."""
    hang = HangLimits(floor_s=7.0, early_floor_s=9.0, start_s=70.0, factor=3.0)
    settings = Settings(vouched_lease_s=5.0, hang=hang)
    needed = ("--job-id", "j", "--world-size", "2", "--journal", "j.jsonl")
    options = parse([*needed, *controller_options(settings, 2)])
    assert (options.hang_floor_s, options.hang_early_floor_s, options.hang_start_s) == (7.0, 9.0, 70.0)
    assert (options.hang_factor, options.vouched_lease_s) == (3.0, 5.0)
