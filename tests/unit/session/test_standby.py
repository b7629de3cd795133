"""What every controller of a job is told, the standbys included."""

from __future__ import annotations

from ttp.config import Settings
from ttp.controller.__main__ import parse
from ttp.standby import hang_options


def test_every_controller_judges_hangs_by_the_jobs_own_settings() -> None:
    """The options of the first controller and of the standbys are the same, and the program takes them."""
    settings = Settings(hang_floor_s=7.0, hang_start_s=70.0, hang_factor=3.0)
    needed = ("--job-id", "j", "--world-size", "2", "--journal", "j.jsonl")
    options = parse([*needed, *hang_options(settings)])
    assert (options.hang_floor_s, options.hang_start_s, options.hang_factor) == (7.0, 70.0, 3.0)
