"""What a person sees while a campaign runs: a table that grows, on a terminal; a line a fault, in a file.

Owns the words; reads the harness and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ttp.chaos.run.campaign import Campaign
from ttp.chaos.run.harness import Harness
from ttp.chaos.verdict.fault_outcome import NOT_REACHED, FaultOutcome
from ttp.chaos.verdict.in_place import finding
from ttp.chaos.verdict.invariants import HELD, VIOLATED, Verdict
from ttp.text.wording import counted

SHOWN = 15
_COLOURS = {HELD: "green", VIOLATED: "bold red"}


class Screen:
    """Follows a campaign. Use as a context manager; the harness calls `on_progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._printed: set[int] = set()
        self._began = time.monotonic()

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_progress(self, harness: Harness, incident: FaultOutcome | None) -> None:
        """Show how the run stands."""
        if self._live is not None:
            self._live.update(Group(incident_table(harness.incidents[-SHOWN:]), self._state(harness, incident)))
        elif incident is not None and incident.outcome and id(incident) not in self._printed:
            self._printed.add(id(incident))
            self._console.print(incident_line(incident))

    def _state(self, harness: Harness, incident: FaultOutcome | None) -> Text:
        record = harness.record
        doing = incident.text if incident is not None and not incident.outcome else "training"
        attempts = len({key for _, key, _, _ in record.hellos})
        lasted = time.monotonic() - self._began
        return Text(
            f"{lasted:,.0f} s; {doing}; step {record.newest_step}; {counted(attempts, 'attempt')} of {record.world_size or '?'} ranks"
        )


def incident_table(incidents: Sequence[FaultOutcome]) -> Table:
    """Return the table of faults: what, what became of it, and how long each stage took."""
    table = Table("fault", "outcome", "lost", "saved step", "seen", "frozen", "published", "first new step")
    for incident in incidents:
        stages = [incident.stages_ms.get(stage) for stage in ("seen", "frozen", "published", "first_new_step")]
        colour = "green" if incident.as_expected else ("yellow" if incident.outcome in ("", NOT_REACHED) else "red")
        table.add_row(
            escape(incident.drawn_text),
            f"[{colour}]{incident.outcome or '...'}[/]",
            "" if incident.lost is None else str(incident.lost),
            "" if incident.saved_step is None else str(incident.saved_step),
            *("" if value is None else f"{value:,.0f} ms" for value in stages),
        )
    return table


def incident_line(incident: FaultOutcome) -> str:
    """Return a fault as one line."""
    lost = "" if incident.lost is None else f", {incident.lost} steps lost"
    saved = "" if incident.saved_step is None else f" step {incident.saved_step}"
    took = incident.stages_ms.get("published")
    again = incident.stages_ms.get("first_new_step")
    times = [f"published after {took:,.0f} ms"] if took is not None else []
    times += [f"first new step after {again:,.0f} ms"] if again is not None else []
    text = f"fault {incident.number}: {escape(incident.drawn_text)}: {incident.outcome}{saved}{lost}"
    return text + (f" ({', '.join(times)})" if times else "")


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print a run's verdicts."""
    table = Table("verdict", "", "what was seen", show_lines=False)
    for verdict in verdicts:
        colour = _COLOURS.get(verdict.state, "yellow")
        table.add_row(verdict.name, f"[{colour}]{verdict.state}[/]", escape(verdict.text))
    console.print(table)


def show_summary(console: Console, campaign: Campaign) -> None:
    """Print the campaign's faults and the verdicts of every run that is not good, or of the last one."""
    console.print(incident_table(campaign.incidents))
    shown = [one for one in campaign.runs if any(verdict.state == VIOLATED for verdict in one.verdicts)]
    for text in filter(None, map(finding, campaign.incidents)):
        console.print(f"[yellow]finding[/]: {escape(text)}")
    for one in shown or campaign.runs[-1:]:
        console.print(f"run {one.number}: {one.lasted_s:,.0f} s, exit status {one.run.status}")
        show_verdicts(console, one.verdicts)
