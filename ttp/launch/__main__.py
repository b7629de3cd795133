"""`ttprun`, as a program; also `python -m ttp.launch`.

Owns the setup before anything is imported. A signal ends the agent at once while it has no workers: Python's exception may be swallowed by a
library that is being imported, and would close the rendezvous for the other nodes. A lost console does not end the job.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttp.fork_server.servers import ForkServers


def main() -> None:
    """Run a job on this node (`ttp.launch.main`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ttp.text.streams import make_streams_last

    make_streams_last()
    from ttp.launch.rendezvous.bounded_call import calls_under_way, end_despite_calls

    try:
        _run()
    except SystemExit as ended:
        if isinstance(ended.code, str):  # Python would print it when the interpreter ends, which may be skipped below
            print(ended.code, file=sys.stderr)
            ended.code = 1
        end_despite_calls(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except BaseException:
        if calls_under_way():
            sys.excepthook(*sys.exc_info())
            end_despite_calls(1)
        raise
    end_despite_calls(0)


def _run() -> None:
    """Run the job; expected errors are printed in one line, with the exit code that torchrun's traceback has."""
    fork_servers = _begin_fork_servers()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    from ttp.config import enabled
    from ttp.launch.endings import REQUEUE_EXIT_CODE, Drained, NeverMet, NotEnded, NotStarted
    from ttp.launch.health.node_health import SickNode
    from ttp.launch.main import main as run
    from ttp.launch.rendezvous.store_failover import TooFewNodes

    try:
        run(fork_servers=fork_servers)
    except ChildFailedError as failed:
        if not enabled():
            raise
        sys.exit(str(failed).strip())
    except SignalException as signalled:
        if not enabled():
            raise
        sys.exit(f"ttprun: {signalled}")
    except RendezvousClosedError:
        sys.exit(1)  # the reason is in the log
    except Drained:
        sys.exit(REQUEUE_EXIT_CODE)  # the reason is in the log
    except (SickNode, TooFewNodes) as error:
        print(f"ttprun: error: {error}", file=sys.stderr)
        sys.exit(REQUEUE_EXIT_CODE)
    except (NeverMet, NotEnded, NotStarted, RendezvousError) as error:
        because = f" ({str(error.__cause__).splitlines()[0]})" if str(error.__cause__ or "") else ""
        print(f"ttprun: error: {error}{because}", file=sys.stderr)
        sys.exit(1)


def _begin_fork_servers() -> ForkServers | None:
    """Start the processes that import the workers' modules while this one imports its own."""
    from ttp.config import warm_start
    from ttp.errors import ConfigError
    from ttp.fork_server.servers import ForkServers

    try:
        if not warm_start() or not {"-h", "--help", "--no-python", "--no_python"}.isdisjoint(sys.argv):
            return None
    except ConfigError:  # reported by main
        return None
    servers = ForkServers()
    servers.begin(os.environ)
    return servers


if __name__ == "__main__":
    main()
