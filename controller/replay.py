"""A run's journal, decided once more: `python -m ttp.controller.replay output/log/journal_0.jsonl`.

Feeds the recorded inputs (`PATH.inputs`) to the machine, prints what it decides, and compares that with what the controller
had written. Exit status: 0 the same decisions, 1 others, 2 there is nothing to replay. Changes no file.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.errors import ProtocolError
from ttp.proto.incident import EVENT as INCIDENT

from .core import machine
from .core.facts.events import Effect, Event, Journal, Send
from .journal import Recording, inputs_path, read_events, read_inputs, replay
from .json_codec import plain_json

BY_THE_DRIVER = frozenset({"stopped", "stays", "protocol_error", "machine_failed", "not_sent"})
"""Lines of the event log that are not the machine's."""


@dataclass(frozen=True, slots=True)
class Decided:
    """One line that the machine wrote, and what it sent with the same input."""

    now: float
    event: str
    fields: Mapping[str, Any]
    sent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """An event log beside its replay. `difference` is empty when they are the same."""

    again: tuple[Decided, ...]
    recorded: tuple[Decided, ...]
    difference: str


def decide_again(recording: Recording) -> Iterator[Decided]:
    """Yield what the machine decides on the recorded inputs."""

    def transition(state: Any, event: Event, now: float) -> tuple[Any, tuple[Effect, ...]]:
        try:
            return machine.transition(state, event, now)
        except ProtocolError:  # as in the run: an input that is refused changes nothing
            return state, ()

    for now, _, _, effects in replay(recording, transition):
        sent = tuple(f"{type(e.message).__name__} to {_listed(e.ranks)}" for e in effects if isinstance(e, Send))
        lines = [effect for effect in effects if isinstance(effect, Journal)]
        for line in lines:
            yield Decided(now, line.event, plain_json(line.fields), sent if line is lines[-1] else ())


def compare(path: Path) -> Comparison:
    """Replay the journal `path`. Raises OSError or ValueError when it cannot be read."""
    inputs = inputs_path(path)
    earlier = Path(f"{inputs}.1")
    if not inputs.exists() and not earlier.exists():
        raise ValueError("there are no recorded inputs")
    try:
        again = tuple(
            itertools.chain.from_iterable(decide_again(read_inputs(p)) for p in (earlier, inputs) if p.exists())
        )
    except (TypeError, LookupError, AttributeError) as error:  # values of a shape that no journal has
        raise ValueError(f"{inputs} holds what no controller has recorded: {type(error).__name__}: {error}") from None
    recorded = tuple(
        Decided(line.monotonic_s, line.event, line.fields)
        for line in read_events(path)
        if line.event not in BY_THE_DRIVER
    )
    if not any(line.event == INCIDENT for line in recorded):  # a controller that journals none has written it
        again = tuple(line for line in again if line.event != INCIDENT)
    if earlier.exists():  # the oldest inputs are not kept: only the end of the log can be replayed
        recorded = recorded[max(0, len(recorded) - len(again)) :]
    return Comparison(again, recorded, _difference(again, recorded))


def _difference(again: tuple[Decided, ...], recorded: tuple[Decided, ...]) -> str:
    for number, (now, then) in enumerate(zip(again, recorded, strict=False), 1):
        if (now.event, now.fields) != (then.event, then.fields):
            return f"line {number}: the controller wrote {_readable(then)!r}, the replay {_readable(now)!r}"
    if len(again) != len(recorded):
        return f"the controller wrote {len(recorded)} lines, the replay {len(again)}; was it killed while it wrote?"
    return ""


def _readable(decided: Decided) -> str:
    fields = [f"{key} {_listed(value)}" for key, value in decided.fields.items() if value not in ([], "", None, {})]
    return f"{decided.event}: {', '.join(fields)}" if fields else decided.event


def _listed(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ttp.controller.replay", description=__doc__)
    parser.add_argument("journal", type=Path, help="journal_N.jsonl, or a standby's standby_N_I.jsonl")
    parser.add_argument("--sent", action="store_true", help="also print what was sent to which ranks")
    options = parser.parse_args(arguments)
    path = options.journal
    path = path.with_name(path.name.removesuffix(".inputs"))
    try:
        compared = compare(path)
    except (OSError, ValueError) as error:
        print(
            f"{path} cannot be replayed: {error}, expected the journal and, beside it, {path.name}.inputs",
            file=sys.stderr,
        )
        return 2
    began = compared.again[0].now if compared.again else 0.0
    for line in compared.again:
        print(f"{line.now - began:10.3f} s  {_readable(line)}")
        for sent in line.sent if options.sent else ():
            print(f"{'':14}-> {sent}")
    print(compared.difference or f"the replay decides the same: {len(compared.again)} lines")
    return 1 if compared.difference else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as any filter
    sys.exit(main())
