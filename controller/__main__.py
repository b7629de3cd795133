"""The controller's process: `python -m ttp.controller --job-id J --world-size W --journal PATH ...`.

Prints one line when it is ready: `ttp-controller listening on HOST:PORT pid N`. Ends by itself when the job has ended or
no rank is attached any more, or when the launcher asks; on SIGTERM only when no rank has been attached for a lease, for schedulers send
that to every process of a job, and Ctrl-C of a terminal does not reach it: it has to see its ranks through their dying gasp. Loads no torch.

`--standby I` makes it the I-th standby: it waits until ranks that have lost their controller come to it. SIGUSR1 ends a
standby without any attached rank, and so does the end of all its guardians; SIGTERM does not while one of them runs. A first
controller has the rank that started it as a guardian, and ends after it in the same way until its ranks have assembled, while
none is attached.

Exit status: 0 ended, 2 wrong arguments, 3 cannot listen, 4 the journal cannot be written, 5 no certificate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ttp.config import host_name, identity_socket, status_port, tls, tls_files
from ttp.errors import ConfigError, ControllerError
from ttp.identity import own
from ttp.identity.role import Identity, Role
from ttp.inputs.options import above_zero, whole
from ttp.proto.address import join_address
from ttp.proto.limits import LAST_STEP, MOST_ADDRESSES
from ttp.proto.transport import grpc
from ttp.text.streams import make_stderr_last

from .agent_link import look_for_controller, request_shutdown
from .core.facts.events import ControllerSettings, EarlierLives
from .core.ranks.takeover import SUPERSEDE_PART
from .driver import Driver
from .handler import StopIfNeverUsed, StopWhenUnused
from .journal import Journal
from .page_process import PageProcess
from .parent_watch import Guardians
from .process import CANNOT_LISTEN, CANNOT_WRITE, PORT_WAIT_S
from .server import GRACE_S, ControlService, add_service, make_server

GUARDIAN_POLL_S = 0.5
NO_CERTIFICATE = 5
MOST_RANKS = 1_000_000
_SECONDS = above_zero("seconds", 1e12)
_DEFAULTS = ControllerSettings("", 1, 1).flat()
_TIMES = {name: value for name, value in _DEFAULTS.items() if type(value) is float}
"""What can be set in seconds, with its default: `--lease-s` for `lease_s`."""
PORT_RETRY_S = 0.25
LOOK_TIMEOUT_S = 30.0
"""A stopped controller, or one that is cut off, learns of its successor when it continues, if that is not longer after."""
LOOK_AGAIN_S = 0.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with 2 on a mistake."""
    parser = argparse.ArgumentParser(prog="ttp-controller", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=whole(most=65535), default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--term", type=whole(1, LAST_STEP), default=1, help="this controller's number")
    parser.add_argument("--world-size", type=whole(1, MOST_RANKS), required=True)
    parser.add_argument(
        "--standby",
        type=whole(most=MOST_ADDRESSES),
        default=0,
        metavar="I",
        help="wait as the I-th standby (default: active)",
    )
    parser.add_argument(
        "--standbys",
        type=whole(most=MOST_ADDRESSES),
        default=0,
        metavar="N",
        help="keep so many standbys behind this one",
    )
    parser.add_argument("--advertise", default="", help="host that the others reach this one by (default: --bind)")
    parser.add_argument(
        "--guardian", type=whole(1), action="append", default=[], metavar="PID", help="see above; repeatable"
    )
    parser.add_argument("--journal", type=Path, required=True, help="file for the event log, as JSON lines")
    parser.add_argument("--local-dirs", action="store_true", help="every node has checkpoint directories of its own")
    parser.add_argument(
        "--most-in-place",
        type=whole(1),
        default=_DEFAULTS["most_in_place"],
        metavar="N",
        help="write the next fault after so many that ended in place (default %(default)s)",
    )
    parser.add_argument(
        "--publish-first", action="store_true", help="a step is published before ranks that continue in place regroup"
    )
    parser.add_argument(
        "--port-wait-s", type=_SECONDS, default=PORT_WAIT_S, metavar="S", help="try a taken port so long"
    )
    for name, default in _TIMES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=_SECONDS, default=default, metavar="S")
    return parser.parse_args(arguments)


def gc_thresholds(world_size: int) -> tuple[int, int, int]:
    """Return when the collector looks for cycles: the machine's state is tuples of frozen values, which have none. A decision makes some ten
    values a rank, and one look at 500,000 of them takes 150 ms."""
    return max(500_000, 20 * world_size), 20, 100


def settings_of(options: argparse.Namespace) -> ControllerSettings:
    """Return what `process.arguments` was given."""
    names = _DEFAULTS.keys() & vars(options).keys()
    return ControllerSettings.from_flat({name: getattr(options, name) for name in names})


def main(arguments: list[str] | None = None) -> int:
    """Run one controller to its end; return the exit status."""
    options = parse(arguments)
    make_stderr_last()  # it is on the journal's disk
    with contextlib.suppress(PermissionError):  # it leads its session already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.set_threshold(*gc_thresholds(options.world_size))
    with contextlib.suppress(
        OSError, ValueError
    ):  # each rank's stream is a descriptor, and most shells start with 1,024
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = settings_of(options)
    try:
        if files := tls_files():
            own.use_site(files, host_name())
        elif tls():
            own.use_agents(identity_socket(), Identity(settings.job_id, Role.CONTROLLER, term=settings.term))
        own.credentials()
        page_port = status_port()
    except (ConfigError, ControllerError) as error:
        print(f"ttp-controller: {error}", file=sys.stderr)
        return NO_CERTIFICATE
    try:
        guardians = Guardians(tuple(options.guardian))
        place = (options.bind, options.port, options.journal, options.advertise)
        asyncio.run(serve(settings, *place, guardians, options.port_wait_s, page_port))
    except ControllerError as error:
        print(f"ttp-controller: {error}", file=sys.stderr)
        return CANNOT_LISTEN
    except _JournalError as error:
        print(f"ttp-controller: {error}", file=sys.stderr)
        return CANNOT_WRITE
    return 0


class _JournalError(Exception):
    pass


async def serve(
    settings: ControllerSettings,
    host: str,
    port: int,
    journal_path: Path,
    advertise: str = "",
    guardians: Guardians | None = None,
    port_wait_s: float = PORT_WAIT_S,
    page_port: int = -1,
) -> None:
    """Listen, and serve until the driver has finished. page_port: of the status page; 0: any free one; -1: there is none. Raises ControllerError, _JournalError."""
    loop = asyncio.get_running_loop()
    server, bound = await listen(host, port, port_wait_s)
    settings = replace(settings, address=join_address(advertise or host, bound, settings.term))
    try:
        journal = Journal(journal_path, settings)
    except OSError as error:
        await server.stop(None)
        raise _JournalError(f"cannot write the journal {journal_path}: {error.strerror}; name another folder") from None
    over = asyncio.Event()

    def on_finish(reason: str) -> None:
        print(f"ttp-controller: ending: {reason}", file=sys.stderr, flush=True)
        loop.call_soon_threadsafe(over.set)

    earlier = Predecessors(settings, lambda found: driver.put(found))
    driver = Driver(settings, journal, on_finish, look_for=earlier.look_for, supersede=earlier.supersede)
    service = ControlService(settings, driver)
    add_service(server, service)
    watched = guardians or Guardians(())
    loop.add_signal_handler(signal.SIGTERM, lambda: driver.put(StopWhenUnused("SIGTERM", guarded=watched.watch_over())))
    loop.add_signal_handler(signal.SIGUSR1, driver.put, StopIfNeverUsed("asked to end unless it is needed"))
    await server.start()
    driver.start()
    watch = asyncio.create_task(leave_when_alone(driver, watched, settings.orphan_timeout_s))
    page = None
    if page_port >= 0:
        job = (settings.job_id, journal_path.parent)
        page = PageProcess(*job, host, advertise or host, page_port, lambda: driver.leads)
        page.start()
    _announce(f"ttp-controller listening on {host}:{bound} pid {os.getpid()}")
    await over.wait()
    watch.cancel()
    service.finish_streams()
    await server.stop(None if await service.await_streams() else GRACE_S)
    journal.close()
    if page is not None:
        page.stop()


async def listen(host: str, port: int, patience_s: float) -> tuple[grpc.aio.Server, int]:
    """Get the port; a certain one may still belong to an earlier attempt's controller, which is leaving. Raises ControllerError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return make_server(host, port)
        except ControllerError:
            if port == 0 or time.monotonic() >= deadline:
                raise
            await asyncio.sleep(PORT_RETRY_S)


async def leave_when_alone(driver: Driver, guardians: Guardians, patience_s: float) -> None:
    """End a controller without any attached rank once its guardians are gone; ranks of other nodes get `patience_s` to come to it."""
    while guardians.alive():
        await asyncio.sleep(GUARDIAN_POLL_S)
    while True:
        await asyncio.sleep(patience_s)
        driver.put(StopIfNeverUsed("the processes that it was started for are gone"))


class Predecessors:
    """The controllers from which this one takes over. Each request is on a thread of its own: the other side may well be stopped."""

    def __init__(self, settings: ControllerSettings, found: Callable[[EarlierLives], None]) -> None:
        """`found`: is called when one answers, on any thread."""
        self._settings = settings
        self._found = found
        self._looks = itertools.count(1)

    def look_for(self, address: str) -> None:
        """Ask the controller at `address` whether it is alive."""
        threading.Thread(target=self._look, args=(address,), name="ttp-look-for", daemon=True).start()

    def supersede(self, address: str, generation: int, look: int) -> None:
        """Order it to end, as it has just answered, and ask again whether it is alive."""
        arguments = (address, generation, look)
        threading.Thread(target=self._order, args=arguments, name="ttp-supersede", daemon=True).start()

    def _look(self, address: str) -> None:
        settings, until = self._settings, time.monotonic() + LOOK_TIMEOUT_S
        while (left_s := until - time.monotonic()) > 0:
            try:
                look = next(self._looks)
                generation = look_for_controller(
                    address, job_id=settings.job_id, term=settings.term, look=look, timeout_s=left_s
                )
            except ControllerError:  # it is gone, or gRPC gave up a connection to one that is stopped
                time.sleep(LOOK_AGAIN_S)
            else:
                return self._found(EarlierLives(address, generation, look))

    def _order(self, address: str, generation: int, look: int) -> None:
        settings = self._settings
        with contextlib.suppress(ControllerError):  # it did not receive it in time, or was too late
            request_shutdown(
                address,
                job_id=settings.job_id,
                reason=f"the controller of term {settings.term} has taken over",
                term=settings.term,
                generation=generation,
                look=look,
                timeout_s=SUPERSEDE_PART * settings.lease_s,
            )
        self._look(address)


def _announce(line: str) -> None:
    """Say the line and let go of stdout: whoever started this process may end before it."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    status = main()
    if status == 0:  # all is written and closed; taking the interpreter apart would keep the next attempt waiting
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the reader has gone, or there is none
                stream.flush()
        os._exit(0)
    sys.exit(status)
