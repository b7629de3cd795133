"""The exhaustive model's streams: FIFO in both directions, broken or closed at any moment, noticed by each side by itself.

A wire is one rank's connections to one controller: the streams that the controller has not seen the end of, oldest first,
the one that it routes by, and what is under way to the rank. Values only; messages are small numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    up: tuple[int, ...]
    """Events under way to the controller."""
    ended: bool
    """The controller will see its end, at any moment: what is under way may arrive before, or be lost."""


class Wire(NamedTuple):
    streams: tuple[Stream, ...] = ()
    route: int = -1
    """Index of the stream on which the rank registered last; -1: none."""
    current: bool = False
    """The last of `streams` is the one that the rank speaks on; not so after either side has given it up."""
    down: tuple[int, ...] = ()
    connected: bool = False
    """The rank holds its stream for open."""
    cut: bool = False
    """The rank's stream is broken, and the rank has not noticed."""
    closing: bool = False
    """The controller has closed it: the rank notices after what is under way."""


def say(wire: Wire, up: tuple[int, ...]) -> Wire:
    """The rank sends on its stream. On a broken one it may still arrive, until either side notices."""
    if not up or not wire.current:
        return wire
    last = wire.streams[-1]
    return wire._replace(streams=(*wire.streams[:-1], Stream(last.up + up, last.ended)))


def tell(wire: Wire, message: int) -> Wire:
    """The controller sends; into nothing when it has no route, or routes by a stream that the rank has left."""
    if not wire.current or wire.route != len(wire.streams) - 1:
        return wire
    return wire._replace(down=(*wire.down, message))


def open_stream(wire: Wire) -> Wire:
    """The rank has a fresh stream."""
    return Wire((*wire.streams, Stream((), False)), wire.route, True, (), True)


def break_stream(wire: Wire) -> Wire:
    """Both sides will notice, each at any later moment."""
    last = wire.streams[-1]
    return wire._replace(streams=(*wire.streams[:-1], Stream(last.up, True)), cut=True)


def rank_leaves(wire: Wire) -> Wire:
    """The rank's side ends: it noticed a break or an end, or its process is gone."""
    streams = tuple(Stream(stream.up, True) for stream in wire.streams)
    return Wire(streams, wire.route)


def controller_leaves(wire: Wire) -> Wire:
    """The controller is over: it hears nothing more, and its streams end after what it has said."""
    return Wire((), -1, False, wire.down, wire.connected, wire.cut, wire.connected)


def take(wire: Wire, index: int) -> tuple[Wire, int]:
    """The controller takes the next event of one stream."""
    stream = wire.streams[index]
    left = Stream(stream.up[1:], stream.ended)
    return wire._replace(streams=(*wire.streams[:index], left, *wire.streams[index + 1 :])), stream.up[0]


def routed(wire: Wire, index: int) -> Wire:
    """A registration came on this stream: older ones are done with, and so is what they still carry."""
    return wire._replace(streams=wire.streams[index:], route=0)


def see_end(wire: Wire, index: int) -> tuple[Wire, bool]:
    """The controller sees a stream's end; True when it was the one it routes by."""
    was_route = index == wire.route
    route = -1 if was_route else wire.route - (wire.route > index)
    current = wire.current and index != len(wire.streams) - 1
    return wire._replace(streams=wire.streams[:index] + wire.streams[index + 1 :], route=route, current=current), was_route
