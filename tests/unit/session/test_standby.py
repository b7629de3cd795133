"""What every controller of a job receives, the standbys included."""

from __future__ import annotations

from ttp.config import Settings
from ttp.controller.__main__ import parse, settings_of
from ttp.controller.process import arguments
from ttp.hang_limits import HangLimits
from ttp.runtime.standby import controller_settings


def test_every_controller_judges_silence_and_hangs_by_the_jobs_own_settings() -> None:
    """The first one and the standbys alike; their program takes them as arguments."""
    hang = HangLimits(floor_s=7.0, early_floor_s=9.0, start_s=70.0, factor=3.0)
    settings = Settings(vouched_lease_s=5.0, hang=hang, shared_dirs=False, standbys=1)
    for place in range(2):
        given = controller_settings(settings, place, 2)
        assert (given.hang, given.vouched_lease_s, given.standbys, given.local_dirs) == (hang, 5.0, 1, True)
        assert (given.freeze_timeout_s, given.orphan_timeout_s) == (10.0, 15.0)
        assert settings_of(parse(["--journal", "j.jsonl", *arguments(given)])) == given


def test_every_controller_knows_how_many_faults_may_end_in_place() -> None:
    """By `TTP_MAX_IN_PLACE`; what the controller does then: `often enough` of tests/unit/protocol/test_regroup.py."""
    for environ, most in (({}, 100), ({"TTP_MAX_IN_PLACE": "2"}, 2)):
        for place in range(2):
            given = controller_settings(Settings.from_env(environ), place, 2)
            assert settings_of(parse(["--journal", "j.jsonl", *arguments(given)])).most_in_place == most


def test_what_a_controller_waits_for_follows_a_long_lease() -> None:
    """In the simulation's proportion: for an answer longer than a lease, for ranks that lost it as long as they look for one."""
    settings = Settings(heartbeat_s=5.0, lease_s=15.0)
    given = controller_settings(settings, 0, 2)
    assert (given.freeze_timeout_s, given.orphan_timeout_s) == (20.0, 75.0)
    assert given.orphan_timeout_s == settings.lost_s
