"""The mirror process of a node's agent: its argument is the descriptor of a file of JSON (`ttp.mirror.source`), and TTP_MIRROR the URL.

Owns the loop, its pauses and its reports: JSON lines on stdout, which the agent reads. The end of its stdin: finish the newest checkpoint, then exit. It has a low
priority, is the first that the kernel picks when memory runs out, and dies with its agent.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttp.config import Settings
from ttp.errors import CheckpointError
from ttp.fork_server.linux import end_with_parent, lower_priority
from ttp.mirror.remote import Remote
from ttp.mirror.source import parse
from ttp.mirror.upload import NotYet, Uploader

LOOK_S = 1.0
"""Between two looks for new checkpoints."""
FIRST_PAUSE_S = 1.0
"""After a failure, doubled by each further one."""
LONGEST_PAUSE_S = 60.0
NEVER_TAKEN = 5
"""A store that has refused so many times, and never taken a write, is not waited for at the job's end."""
_DOUBLED = 16
"""Pauses are, so many times at most: a store may be away for days."""
_NICE = 15
_TOGETHER = 3
"""So many of the newest may lack files of other nodes."""


class Loop:
    """Copies what is published until `ending` is set and the newest checkpoint is in the mirror."""

    def __init__(self, uploader: Uploader, say: Callable[[dict[str, Any]], None], ending: threading.Event) -> None:
        self._uploader = uploader
        self._say = say
        self._ending = ending
        self._failures = 0
        self._begun = self._probed = False
        self._added = False
        """There is one more in the mirror since the older ones were removed."""

    def run(self) -> None:
        while True:
            pause_s = self.turn()
            if not self._ending.is_set():
                self._ending.wait(pause_s)
            elif self._uploader.has_newest():
                return
            elif not self._probed and self._failures >= NEVER_TAKEN:
                self._report("given up", error=f"the store has taken no write in {self._failures} tries")
                return
            else:
                time.sleep(min(pause_s, LOOK_S))

    def turn(self) -> float:
        """Copy the newest checkpoint that is not in the mirror; return how long to wait before the next turn."""
        try:
            if not self._begun:
                self._begin()
            for path in self._uploader.pending()[:_TOGETHER]:
                begun_s = time.monotonic()
                with contextlib.suppress(NotYet):  # then one before it may be
                    nbytes = self._uploader.copy(path)
                    self._report("mirrored", path=str(path), nbytes=nbytes, took_s=round(time.monotonic() - begun_s, 3))
                    self._added = True
                    break
            if not self._added:
                return LOOK_S
            if removed := self._uploader.remove_older():
                self._report("removed", removed_steps=removed)
            self._added, self._failures = False, 0
            return 0.0
        except FileNotFoundError:  # it was pruned, or renamed as broken, meanwhile
            return LOOK_S
        except CheckpointError as error:
            self._report("passed over", error=str(error))
            return 0.0
        except OSError as error:
            self._failures += 1
            self._begun = False  # a cut upload may have left its parts
            self._report("failed", error=str(error), failures=self._failures)
            return min(FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, _DOUBLED), LONGEST_PAUSE_S)

    def _begin(self) -> None:
        if aborted := self._uploader.begin():
            self._report("aborted", uploads=aborted)
        if not self._probed:
            self._uploader.remote.check_conditional()
            if not self._uploader.remote.conditional:
                self._report("not conditional")
        self._begun = self._probed = True

    def _report(self, what: str, **fields: Any) -> None:
        lag = self._uploader.lag()
        self._say({"what": what, **asdict(lag), "behind_s": round(lag.behind_s, 3), **fields})


def _await_end(ending: threading.Event) -> None:
    sys.stdin.read()
    ending.set()


def main() -> None:
    end_with_parent(signal.SIGKILL)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a job: the agent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_await_end, args=(ending,), name="ttp-mirror-end", daemon=True).start()
    lower_priority(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with open(int(sys.argv[1]), "rb") as content:
        source = parse(json.load(content))
    remote = Remote(Settings.from_env().mirror)

    def say(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), flush=True)

    with contextlib.suppress(BrokenPipeError):
        Loop(Uploader(remote, source), say, ending).run()


if __name__ == "__main__":
    main()
