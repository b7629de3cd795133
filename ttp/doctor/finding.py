"""What a check found: a line for people, an object for programs (PURE).

Owns the three verdicts, and the one on the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape

OK, WARNING, FAILED = "ok", "warning", "failed"
_COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result."""

    name: str
    status: str
    """`ok`, `warning` or `failed`."""
    found: str
    expected: str = ""
    """What the run needs; empty: it has it."""
    do: str = ""
    """What to do; empty: nothing."""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """What was measured, for programs."""


def judged(
    name: str, good: bool, found: str, expected: str, do: str, *, bad: str = WARNING, **figures: float | int | str
) -> Finding:
    """Return a finding that is ok where `good` is true, else `bad`, with what is expected and what to do."""
    return Finding(name, OK, found, figures=figures) if good else Finding(name, bad, found, expected, do, figures)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Say whether the run would fail."""
    return any(finding.status == FAILED for finding in findings)


def line(finding: Finding) -> str:
    """Return a finding as a line of rich markup."""
    text = f"{finding.name}: {finding.found}"
    text += f"; expected {finding.expected}" if finding.expected else ""
    text += f". {finding.do}" if finding.do else ""
    return f"[{_COLOURS[finding.status]}]{finding.status:<7}[/] {escape(text)}"


def fields(findings: Sequence[Finding], notes: Sequence[str]) -> dict[str, Any]:
    """Return the object that --json prints."""
    checks = [{**asdict(each), "figures": dict(each.figures)} for each in findings]
    return {"status": int(has_failed(findings)), "checks": checks, "notes": list(notes)}
