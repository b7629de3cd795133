"""What may be done to one rank from inside, and what it reports to the harness.

Faults come from two places: `TTP_FAULTS` (`ttp.chaos.faults.inject`), fixed at the start, and the socket that `TTP_CHAOS` names,
on which `ttp chaos` gives orders while the job trains. Without either nothing here is ever called during a step, there is
no thread and no socket. A harness that is gone, or takes in nothing any more, is not a fault: the rank trains on.

On the socket, a JSON object a line. The rank sends `hello` first and waits for the orders of its attempt; then it reports where
the journals are (`log_dir`), every step that it has finished (the commit record's bits), what it resumed from, and, right before a fault, that it begins
(`firing`: the moment of a death is known to the harness to a fraction of a millisecond). Orders may come at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttp.chaos.faults.disk import dump_faults, tap
from ttp.chaos.faults.inject import (
    DUMP_POINTS,
    POINTS,
    START_POINTS,
    Injection,
    commit,
    injector,
    meant_for,
    parse_faults,
    start_injector,
)
from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.proto.messages import CommitRecord
from ttp.runtime.instrumentation import Around, HookedHolder, HookedOptimizer, Instrumentation

FIRST_ORDERS_S = 30.0
"""How long a rank waits for the orders of its attempt. The harness answers within milliseconds, unless it is stopped itself."""
TELL_S = 5.0
"""How long a rank waits with a line for a harness that takes in none: one that is stopped, say. Then it counts as gone."""
CLOSE_S = 5.0
NOW = "now"
"""The point of an order that is carried out when it comes, on a thread of its own."""


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """A fault that the harness wants: at the first step from `fault.step` on that comes to its point, in any dump where
    the point is one of a dump, or at once."""

    id: int
    fault: Injection


def order_line(order: FaultOrder) -> dict[str, Any]:
    """Return an order's form on the socket."""
    fault = order.fault
    fields = {name: getattr(fault, name) for name in Injection.__dataclass_fields__}
    return {"id": order.id, **fields}


def parse_order(line: Mapping[str, Any]) -> FaultOrder:
    fields = {name: line[name] for name in Injection.__dataclass_fields__}
    return FaultOrder(int(line["id"]), Injection(**fields))


class RankFaults:
    """All faults of one rank in one attempt, plugged into its session (`ttp.runtime.instrumentation`)."""

    def __init__(self, settings: Settings, rank: int, world_size: int, save_dirs: Sequence[str]) -> None:
        """Raises ConfigError: TTP_FAULTS is wrong, or TTP_CHAOS names no socket of a harness."""
        faults = parse_faults(settings.faults)
        self._rank, self._round = rank, settings.round_number
        self._again = settings.replaces > 0
        self._mine = meant_for(faults, rank, settings.round_number, self._again)
        self._at_start = start_injector(faults, rank, settings.round_number, self._again)
        self._hook: Hook | None = None
        if settings.chaos:
            facts = {
                "rank": rank,
                "world_size": world_size,
                "start": settings.round_number,
                "save_dirs": list(save_dirs),
            }
            self._hook = Hook(settings.chaos, facts)

    def at_start(self, point: str) -> None:
        """The attempt's startup has come to this point."""
        self._at_start(point)
        if self._hook is not None:
            self._hook.at_point(point, 0)

    def logs_in(self, log_dir: Path) -> None:
        """Controllers of this attempt write their journals there."""
        if self._hook is not None:
            self._hook.tell("log_dir", log_dir=str(log_dir))

    def attach(self, optimizer: HookedOptimizer, holder: HookedHolder) -> None:
        """Hook the points of a step and of a dump, where something is meant for them."""
        optimizer.on_point = injector(self._mine, self._rank, self._round, self._again)
        around = dump_faults(self._mine)
        if self._mine:
            holder.around = around
        if self._hook is not None:
            optimizer.on_point = self._hook.at_steps(optimizer, optimizer.on_point)
            holder.around = self._hook.around(around)

    def resumed(self, step: int, path: str, skipped: Sequence[str], record: CommitRecord | None) -> None:
        """A checkpoint was loaded."""
        if self._hook is not None:
            bits = record_bits(record) if record is not None else None
            self._hook.tell("resumed", step=step, path=path, skipped=list(skipped), record=bits)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.close()


def instrument(settings: Settings, rank: int, world_size: int, save_dirs: Sequence[str]) -> Instrumentation:
    """Return the faults of one rank, for its session. Raises ConfigError as `RankFaults` does."""
    return RankFaults(settings, rank, world_size, save_dirs)


class Hook:
    """The rank's end of the harness's socket."""

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._orders: list[FaultOrder] = []
        self._lock = threading.Lock()  # guards _orders
        self._sending = threading.Lock()  # one line at a time
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        seconds, rest = divmod(TELL_S, 1.0)  # for what is sent only: `_listen` may wait for ever
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"rank {facts['rank']}: TTP_CHAOS: got {path!r}, expected the socket of a running `ttp chaos` ({error.strerror});"
                " take the variable out of the environment to train without it"
            ) from None
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self.tell("hello", pid=os.getpid(), **facts)
        self._socket.settimeout(FIRST_ORDERS_S)
        try:
            self._take(self._lines.readline())
        except OSError:  # a file whose socket timed out once reads nothing more
            self._lines = self._socket.makefile("r", encoding="utf-8")
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="ttp-chaos", daemon=True)
        self._thread.start()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a line. A harness that has gone does not receive it, and one that takes in nothing for `TELL_S` has gone, too: half a
        line may be on its way, so nothing can follow it."""
        line = json.dumps({"type": kind, "unix_s": time.time(), **fields}) + "\n"
        with self._sending:
            try:
                self._socket.sendall(line.encode(), socket.MSG_NOSIGNAL)  # whatever the trainer did to SIGPIPE
            except OSError:
                with contextlib.suppress(OSError):  # later lines fail at once, and no orders are taken either
                    self._socket.shutdown(socket.SHUT_RDWR)

    def at_steps(
        self, optimizer: HookedOptimizer, before: Callable[[str, int], None] | None
    ) -> Callable[[str, int], None]:
        """Return what the optimizer calls at each point of a step; `before` is called first."""

        def on_point(point: str, step: int) -> None:
            if before is not None:
                before(point, step)
            record = optimizer.last_record
            if point == "done" and record is not None and record.step == step:
                self.tell("step", step=step, rank=self._facts["rank"], **record_bits(record))
            self.at_point(point, step)

        return on_point

    def at_point(self, point: str, step: int) -> None:
        """Carry out what is ordered for here."""
        if not self._orders:  # every step but a few
            return
        for order in self._due(point, step):
            self._commit(order, point, step)

    def around(self, before: Around) -> Around:
        """Return what a holder wraps its writing and publishing in."""

        @contextlib.contextmanager
        def dump(point: str, step: int, path: str) -> Any:
            with contextlib.ExitStack() as stack:
                stack.enter_context(before(point, step, path))
                for order in self._due(point, step):
                    if order.fault.times > 1:
                        self._keep(FaultOrder(order.id, replace(order.fault, times=order.fault.times - 1)))

                    def fire(fault: Injection, order: FaultOrder = order) -> None:
                        self._commit(order, point, step)

                    stack.enter_context(tap(order.fault, Path(path), fire))
                yield

        return dump

    def close(self) -> None:
        """Say goodbye: no orders come any more."""
        self.tell("goodbye")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _due(self, point: str, step: int) -> list[FaultOrder]:
        with self._lock:
            due = [order for order in self._orders if order.fault.point == point and step >= order.fault.step]
            self._orders = [order for order in self._orders if order not in due]
        return due

    def _keep(self, order: FaultOrder) -> None:
        with self._lock:
            self._orders.append(order)

    def _commit(self, order: FaultOrder, point: str, step: int) -> None:
        self.tell("firing", id=order.id, point=point, step=step)
        commit(replace(order.fault, step=step))

    def _listen(self) -> None:
        """Take orders until the harness or this rank has gone."""
        with contextlib.suppress(OSError, ValueError), self._lines:
            for line in self._lines:
                self._take(line)

    def _take(self, line: str) -> None:
        if not line:
            return
        message = json.loads(line)
        with self._lock:
            self._orders = [order for order in self._orders if order.id not in message["cancel"]]
        for fields in message["orders"]:
            order = parse_order(fields)
            if order.fault.point == NOW:
                threading.Thread(
                    target=self._commit, args=(order, NOW, order.fault.step), name="ttp-chaos-now", daemon=True
                ).start()
            else:
                assert order.fault.point in (*POINTS, *START_POINTS, *DUMP_POINTS), order
                self._keep(order)


def record_bits(record: CommitRecord) -> dict[str, Any]:
    """Return what two runs must agree on in a step, to the last bit."""
    return {"grad_norm": float(record.grad_norm).hex(), "sums": [float(value).hex() for value in record.sums]}
