"""The learning rate is a function of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ttp.trainer.config.schema import Config
from ttp.trainer.schedule import learning_rate

PEAK, END, WARMUP, DECAY = 1e-3, 1e-4, 10, 110
SCHEDULE = "optimizer_config.learning_rate_scheduler_kwargs"


Rates = Callable[..., list[float]]


@pytest.fixture
def rates(small_config: Callable[[dict[str, Any]], Config]) -> Rates:
    """Return a function from steps to rates, with changed keys."""
    schedule = f"{{warmup_steps: {WARMUP}, decay_steps: {DECAY}, end_learning_rate: {END}, use_cosine: false}}"

    def rates_of(steps: list[int], changes: dict[str, Any] | None = None) -> list[float]:
        config = small_config({"optimizer_config.learning_rate": PEAK, SCHEDULE: schedule, **(changes or {})})
        return [learning_rate(config, step) for step in steps]

    return rates_of


def test_warm_up_is_a_line_that_ends_at_the_peak(rates: Rates) -> None:
    """Step 1 already has a rate above zero."""
    assert rates([1, 5, 10]) == pytest.approx([PEAK / 10, PEAK / 2, PEAK])


def test_linear_decay_ends_at_decay_steps_and_stays(rates: Rates) -> None:
    """Warm-up is part of decay_steps."""
    assert rates([60, 110, 111, 5000]) == pytest.approx([(PEAK + END) / 2, END, END, END])
    assert rates([35])[0] == pytest.approx(END + 0.75 * (PEAK - END))


def test_cosine_decay_is_half_a_wave(rates: Rates) -> None:
    """Slow at both ends, half way in the middle."""
    cosine = {f"{SCHEDULE}.use_cosine": True}
    quarter = END + (PEAK - END) * (1 + 0.5**0.5) / 2
    assert rates([10, 35, 60, 110, 200], cosine) == pytest.approx([PEAK, quarter, (PEAK + END) / 2, END, END])


def test_decay_lasts_as_long_as_the_training_unless_configured(rates: Rates) -> None:
    """decay_steps: null is training_iters."""
    changes = {f"{SCHEDULE}.decay_steps": None, "training_config.training_iters": 50}
    assert rates([49, 50], changes)[1] == pytest.approx(END)
    assert rates([49], changes)[0] > END


def test_no_schedule_is_constant(rates: Rates) -> None:
    """learning_rate_scheduler_kwargs: null."""
    assert rates([1, 10, 10**6], {SCHEDULE: None}) == [PEAK] * 3


def test_training_shorter_than_its_warm_up_ends_in_it(rates: Rates) -> None:
    """A short trial of a long preset is not an error."""
    changes = {f"{SCHEDULE}.decay_steps": None, "training_config.training_iters": 5}
    assert rates([5, 10], changes) == pytest.approx([PEAK / 2, PEAK])
