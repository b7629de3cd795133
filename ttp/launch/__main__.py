"""`ttprun`, as a program; also `python -m ttp.launch`.

Owns what holds before anything is loaded: until the launcher has workers, a signal ends it at once. Python's own way, an
exception, is lost where a library that is being imported swallows it, and would close the rendezvous for the other nodes.
And whatever becomes of the console, the job goes on.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run a job on this node (`ttp.launch.main`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ttp.launch.streams import make_streams_last

    make_streams_last()
    from ttp.launch.agent import NotStarted
    from ttp.launch.main import main as run

    try:
        run()
    except NotStarted as error:
        print(f"ttprun: error: {error}", file=sys.stderr)
        sys.exit(1)  # as after the traceback that torchrun leaves


if __name__ == "__main__":
    main()
