"""`ttp_to_persist`: the decorator that keeps a rank alive at the end of `train` until its state is safe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ttp.exchange import error_file

P = ParamSpec("P")
R = TypeVar("R")
_LEFT = object()


def ttp_to_persist(train: Callable[P, R]) -> Callable[P, R]:
    """Protect `train`, the function that holds the training loop (every rank calls it).

    - It raises: the rank reports it to the controller, stays as a holder of its shards until the dying-gasp checkpoint is
      published or refused, and the exception goes on (or the process ends with status 75, when a peer was the cause).
    - It returns: the rank stays as a holder until every rank has returned, so that a fault in somebody's last step
      still finds all replicas.
    - `ENABLE_TTP=False`, or no session was started: `train` runs as it is.

    - A rank was lost and another process is in its place (`ttp.start(in_place=True)`), or `TTP_REHEARSE` is set: the process groups are made again,
      and `train` is called again, with the same arguments. It has to begin where the session is (`optimizer.current_step + 1`), as after a
      restart.

    The session may be started before the call or inside `train`. Under a launcher, an exception that ends this process is
    recorded from here on (`ttp.exchange.error_file`).
    """
    error_file.install()

    @functools.wraps(train)
    def persistent(*args: P.args, **kwargs: P.kwargs) -> R:
        from ttp.session import current_session, find_session

        session = find_session()
        if session is not None:
            session.begin_train()
        try:
            while (result := _called(train, *args, **kwargs)) is _LEFT:
                current_session().come_back()
        except BaseException as exc:
            if (session := find_session()) is not None:
                session.regrouping.end_train()
                session.hold_after(exc)
            raise
        if (session := find_session()) is not None:
            session.regrouping.end_train()
            session.hold_until_all_finish()
        return result

    return persistent


def _called(train: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | Any:
    """Call it; return _LEFT where it is to be called again. Its frames are gone by then, with all the memory that they held."""
    from ttp.session import find_session

    try:
        if (session := find_session()) is not None:
            session.regrouping.enter()
        return train(*args, **kwargs)
    except BaseException as exc:
        session = find_session()
        if session is None or not session.enters_again(exc):
            raise
        return _LEFT
