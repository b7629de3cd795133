"""What a self-test found: each check with its verdict, its figures and its reason; as JSON, and as lines for people.

Owns the verdict on the whole: passed only where no check failed and every check that means something on this device was run (PURE).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, MEASURED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "measured", "not applicable", "not run"
INCOMPLETE = "incomplete"
"""Of the whole: nothing failed, and something could not be run."""
FORMAT = 1
_NOT_SHOWN = ("format", "verdict", "device", "checks", "trainer_device")


@dataclass(frozen=True, slots=True)
class Check:
    """One check's result."""

    name: str
    status: str
    """`passed`, `failed`, `measured` (figures without a bound), `not applicable` to this device, or `not run`."""
    reason: str = ""
    """What was seen, or why it could not be run."""
    figures: Mapping[str, Any] = field(default_factory=dict)


def verdict(checks: Sequence[Check]) -> str:
    """Return `passed`, `failed` or `incomplete`."""
    found = {check.status for check in checks}
    if FAILED in found:
        return FAILED
    return INCOMPLETE if NOT_RUN in found or PASSED not in found else PASSED


def as_json(about: Mapping[str, Any], checks: Sequence[Check]) -> dict[str, Any]:
    """Return the report's form in report.json. about: the device, the versions, and how it was run."""
    entries = [
        {"name": each.name, "status": each.status, "reason": each.reason, "figures": dict(each.figures)}
        for each in checks
    ]
    return {"format": FORMAT, "verdict": verdict(checks), **about, "checks": entries}


def as_text(report: Mapping[str, Any]) -> str:
    """Return the lines of report.txt."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"TTP self-test: {report['verdict']}"
    about = {**report["device"], **report}
    yield from (f"  {name:<15} {value}" for name, value in about.items() if name not in _NOT_SHOWN)
    for check in report["checks"]:
        yield f"{check['status']:<15} {check['name']}{': ' if check['reason'] else ''}{check['reason']}"
        yield from (f"{'':<17}{name} {value}" for name, value in check["figures"].items())
