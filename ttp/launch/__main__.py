"""`ttprun`, as a program; also `python -m ttp.launch`.

Owns what holds before anything is loaded: until the launcher has workers, a signal ends it at once. Python's own way, an
exception, is lost where a library that is being imported swallows it, and would close the rendezvous for the other nodes.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run a job on this node (`ttp.launch.main`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ttp.launch.main import main as run

    run()


if __name__ == "__main__":
    main()
