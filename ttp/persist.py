"""`ttp_to_persist`: the decorator that keeps a rank alive at the end of `train` until its state is safe."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ttp.exchange import error_file

P = ParamSpec("P")
R = TypeVar("R")
_LEFT = object()


@overload
def ttp_to_persist(train: Callable[P, R]) -> Callable[P, R]: ...


@overload
def ttp_to_persist(*, in_place: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def ttp_to_persist(train: Any = None, *, in_place: bool = True) -> Any:
    """Protect `train`, the function that holds the training loop (every rank calls it).

    - It raises: the rank reports it to the controller, stays as a holder of its shards until the dying-gasp checkpoint is
      published or refused, and the exception goes on (or the process ends with status 75, when a peer was the cause).
    - It returns: the rank stays as a holder until every rank has returned, so that a fault in somebody's last step
      still finds all replicas.
    - `ENABLE_TTP=False`, or no session was started: `train` runs as it is.

    - A rank was lost and another process is in its place (`ttp.start(in_place=True)`), or `TTP_REHEARSE` is set: the process groups are made again,
      and `train` is called again, with the same arguments. It has to begin where the session is (`optimizer.current_step + 1`), as after a
      restart. `@ttp_to_persist(in_place=False)`: it never is; a rank that dies costs a checkpoint and a restart.

    The session may be started before the call or inside `train`. Under a launcher, an exception that ends this process is
    recorded from here on (`ttp.exchange.error_file`).
    """
    if train is None:
        return functools.partial(_persistent, in_place=in_place)
    return _persistent(train, in_place=in_place)


def _persistent(train: Callable[P, R], *, in_place: bool) -> Callable[P, R]:
    error_file.install()

    @functools.wraps(train)
    def persistent(*args: P.args, **kwargs: P.kwargs) -> R:
        from ttp.session import current_session, find_session

        session = find_session()
        if session is not None:
            session.begin_train(_named(train), in_place=in_place)
        try:
            while (result := _called(train, *args, **kwargs)) is _LEFT:
                session = current_session()
                if session.begun:
                    session.come_back()
                else:  # it was started inside
                    session.begin_train(_named(train), in_place=in_place)
            if (session := find_session()) is not None:
                session.regrouping.end_train()
        except BaseException as exc:
            if (session := find_session()) is not None:
                session.regrouping.end_train(exc)
                session.hold_after(exc)
            raise
        if session is not None:
            session.hold_until_all_finish()
        return result

    return persistent


def _named(train: Callable[..., object]) -> str:
    """Return a function's name and place, for messages."""
    code = getattr(inspect.unwrap(train), "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(train, '__qualname__', 'train')}(){place}"


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
