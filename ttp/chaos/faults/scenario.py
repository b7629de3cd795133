"""A schedule of faults, as people write it: read from YAML, checked where it is read, and frozen.

    name: two kills and a full disk
    seed: 7                        # of all random choices (default: drawn, and reported)
    repeat: 2                      # the whole list so often
    faults:
      - fault: kill                # what (KINDS)
        rank: random               # whom: a rank, a list of ranks, or `random` (the default)
        after_steps: [2, 8]        # when: so many steps after the job progresses again; a range is drawn from by the seed
        point: updating            # where in the step (default: at once, from outside or from another thread)
      - fault: kill
        step: 40                   # in this step of the job, or the first one after it
        then:                      # further faults before the job is back
          - {fault: kill, rank: 1, event: write_sent}      # when a controller's journal says so
          - {fault: corrupt}                               # (its own event: published)
      - {fault: stop, after_s: 1.5, for_s: 1, expect: [unharmed, saved]}

Owns the words and what they may be; carries nothing out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttp.chaos.faults.inject import DUMP_POINTS, POINTS, START_POINTS
from ttp.chaos.observed.leaks import GROWTH_MIB
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.strict_yaml import read_yaml_file

MOST_FAULTS = 10_000
"""Of a scenario, with every `repeat`."""
LARGEST = 2**31 - 1
LONGEST_S = 1e9
"""Thirty years, as for TTP's own settings."""

OUTCOMES = ("saved", "in_place", "unharmed", "refused", "fell_back", "relaunched")
"""What may become of a fault: a dying gasp was published and resumed from; the lost ranks were replaced, and the others ran on; training went on (unhurt, a false alarm, or under
another controller); no dump was possible, and the job said why; a checkpoint was broken, and an older one was taken; the
command was started anew and went on from the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    place: str
    """Whom it hits: rank, dump (a rank while it writes), controller, agent, disk, checkpoint, node."""
    outcomes: tuple[str, ...]
    """What must become of it, unless `expect` says otherwise."""
    text: str
    points: tuple[str, ...] = ()
    """Where it may be ordered; the first is the default. `now`: at once."""
    wants: tuple[str, ...] = ()
    """Fields that it cannot do without."""


_SAVED, _ANY = ("saved",), ("unharmed", "saved")
_AT_ONCE = ("now", *POINTS, *START_POINTS, *DUMP_POINTS)
_IN_STEP = (*POINTS, *DUMP_POINTS)
KINDS: dict[str, FaultKind] = {
    "kill": FaultKind("rank", _SAVED, "SIGKILL", _AT_ONCE),
    "stop": FaultKind("rank", _ANY, "SIGSTOP, and SIGCONT after `for_s` (without: never)", _AT_ONCE),
    "term": FaultKind("rank", _SAVED, "SIGTERM: the notice that the process will be taken away", ("now", *POINTS)),
    "segv": FaultKind("rank", _SAVED, "an invalid memory access", _AT_ONCE),
    "abort": FaultKind("rank", _SAVED, "abort()", _AT_ONCE),
    "exit": FaultKind("rank", _SAVED, "os._exit(1)", _AT_ONCE),
    "raise": FaultKind("rank", _SAVED, "an exception in the training thread", POINTS),
    "async": FaultKind("rank", _SAVED, "an exception that comes over the main thread at any instruction", ("now", *POINTS)),
    "hang": FaultKind("rank", _SAVED, "the training thread sleeps for ever", _IN_STEP),
    "gil": FaultKind("rank", _SAVED, "Python's lock is held for `for_s` (without: for ever): no thread of the process runs", _AT_ONCE),
    "slow": FaultKind("rank", _ANY, "the training thread sleeps for `for_s`", _IN_STEP, ("for_s",)),
    "cpu": FaultKind("rank", _ANY, "two threads of the rank count for `for_s`", ("now", *POINTS), ("for_s",)),
    "memory": FaultKind("rank", _ANY, "`mib` more are filled, for `for_s`", ("now", *POINTS), ("for_s", "mib")),
    "enospc": FaultKind("dump", _ANY, "every write to a checkpoint fails: no room", DUMP_POINTS),
    "eio": FaultKind("dump", _ANY, "every write to a checkpoint fails: an input/output error", DUMP_POINTS),
    "torn": FaultKind("dump", _ANY, "half of a file that was promised to be durable is missing", ("write",)),
    "slowdisk": FaultKind("dump", _ANY, "each system call that makes a checkpoint durable takes `for_s` more", DUMP_POINTS, ("for_s",)),
    "kill_controller": FaultKind("controller", ("unharmed",), "SIGKILL to the active controller"),
    "stop_controller": FaultKind("controller", ("unharmed",), "SIGSTOP to the active controller, and SIGCONT after `for_s`", (), ("for_s",)),
    "kill_agent": FaultKind("agent", ("relaunched", "saved"), "SIGKILL to a launcher; it is started anew when its ranks have left"),
    "fill_disk": FaultKind("disk", _ANY, "the disk of `small_disk_mib` is filled, and given back after `for_s`", (), ("for_s",)),
    "corrupt": FaultKind("checkpoint", ("fell_back",), "bits of the newest published checkpoint are flipped"),
    "partition": FaultKind("node", _ANY, "a node's cable is pulled, and put back after `for_s`", (), ("for_s",)),
    "delay": FaultKind("node", _ANY, "every packet of a node takes `ms` longer, for `for_s`", (), ("for_s", "ms")),
    "lose_node": FaultKind("node", ("saved",), "a node is lost, cable and processes; a new launcher starts on it"),
}  # fmt: skip
"""To add a kind: a row here; what it does, in `inject.py` (a rank), `disk.py` (a dump) or `external.py` (anything else); its row in docs/chaos.md and
a line in examples/chaos/kinds.yaml. `matrix.py` lists its cells."""
_SEEN_AT_ONCE = ("kill", "segv", "abort", "exit", "raise", "async")
"""Kinds that are known at once and for certain: what they cost can be replaced, as nothing of it runs on elsewhere."""
_STANDS_STILL = ("stop", "gil")
"""Kinds after which a process is silent, for good without `for_s`: its agent ends it."""
EVENTS = (
    "suspect", "stalled", "hung", "death_seen", "fault_reported", "freeze_sent", "frozen", "decided", "rolled_forward",
    "regroup_sent", "replacement_came", "regrouped", "write_sent", "written", "publish_sent", "published", "exit_sent", "takeover_began", "took_over",
    "standby_started",
)  # fmt: skip
"""Lines of a controller's journal at which a further fault may come."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault comes; one of the four ways is given."""

    step: int | None = None
    after_steps: tuple[int, int] | None = None
    after_s: tuple[float, float] | None = None
    event: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One fault of a schedule, and those that come before the job has recovered from it."""

    kind: str
    ranks: tuple[int, ...] = ()
    """Empty: `count` random ones. Of a fault that hits a node: the rank whose node it is."""
    count: int = 1
    moment: Moment = Moment()
    point: str = ""
    """Empty: not at a point of a rank's step, startup or dump."""
    for_s: float = 0.0
    ms: float = 0.0
    mib: int = 0
    call: int = 0
    call_name: str = ""
    times: int = 1
    node: int | None = None
    expect: tuple[str, ...] = ()
    then: tuple[FaultSpec, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError: this kind has no such point. What is read from a file was refused before, with its place there."""
        if self.point not in (KINDS[self.kind].points or ("",)):
            raise ValueError(
                f"{self.kind} has no point {self.point!r}, expected {' or '.join(KINDS[self.kind].points) or 'none'}"
            )

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What may become of it, its `then` included."""
        if self.expect:
            return self.expect
        allowed = dict.fromkeys(KINDS[self.kind].outcomes)
        for fault in self.then:
            if fault.kind == "corrupt":
                return ("fell_back",)
            if fault.kind in ("kill_agent", "fill_disk", "enospc", "eio"):
                allowed |= dict.fromkeys((*KINDS[fault.kind].outcomes, "refused"))
        if max(len(self.ranks), self.count) > 1 or any(KINDS[fault.kind].place == "rank" for fault in self.then):
            allowed["refused"] = None  # perhaps they were all who held a shard
        return tuple(allowed)

    @property
    def text(self) -> str:
        """`kill of rank 2 at updating, then corrupt`."""
        whom = KINDS[self.kind].place
        if whom in ("rank", "dump"):
            ranks = ", ".join(map(str, self.ranks)) or (f"{self.count} random" if self.count > 1 else "random")
            whom = f"rank{'s' if max(len(self.ranks), self.count) > 1 else ''} {ranks}"
        elif whom in ("node", "agent") and self.ranks:
            whom = f"the node of rank {self.ranks[0]}"
        elif whom == "node" or (whom == "agent" and self.node is not None):
            whom = f"node {'random' if self.node is None else self.node}"
        else:
            whom = ""
        where = f" at {self.point}" if self.point and self.point != "now" else ""
        after = "".join(f", then {fault.text}" for fault in self.then)
        return f"{self.kind}{f' of {whom}' if whom else ''}{where}{after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole schedule."""

    name: str
    seed: int
    faults: tuple[FaultSpec, ...]
    deadline_s: float = 300.0
    """An incident that is not over by then is a violation of I11."""
    job_s: float = 3600.0
    """The job must end within this time after its last fault; the baseline one within it altogether."""
    small_disk_mib: int = 0
    """The job's checkpoint directory is a file system of this size (needs the right to mount)."""
    nodes: int = 0
    """The command is run once on each of so many network namespaces; 0: once, here."""
    growth_mib: float = GROWTH_MIB
    """A rank whose memory grows by more in 1,000 steps leaks."""
    in_place: bool = False
    """Ranks that are lost are replaced, and the others run on, wherever that is possible (TTP_IN_PLACE)."""
    environ: Mapping[str, str] = field(default_factory=dict)

    def outcomes(self, fault: FaultSpec) -> tuple[str, ...]:
        """Return what may become of a fault here: what is saved may be spared the checkpoint."""
        more = self.in_place and "saved" in fault.outcomes and "in_place" not in fault.outcomes
        return (*fault.outcomes, *(("in_place",) if more else ()))

    def in_place_due(self, fault: FaultSpec) -> bool:
        """Say whether a fault is to end in place, if replicas cover what one rank held: one rank ends, raises or stands still for good in training, and
        nothing follows."""
        alone = max(len(fault.ranks), fault.count) == 1 and not fault.then
        kind = fault.kind in _SEEN_AT_ONCE or (fault.kind in _STANDS_STILL and not fault.for_s)
        return self.in_place and alone and kind

    @property
    def variables(self) -> Mapping[str, str]:
        """What the job's environment has besides what this process has."""
        return {"TTP_IN_PLACE": "unrehearsed" if self.in_place else "False", **self.environ}

    def __post_init__(self) -> None:
        kinds = [fault for top in self.faults for fault in (top, *top.then)]
        if not self.nodes and (alone := [fault.kind for fault in kinds if KINDS[fault.kind].place == "node"]):
            raise ConfigError(
                f"scenario {self.name!r}: {alone[0]} needs several nodes, got nodes: 0; add `nodes: 2` or more"
            )
        if wrong := [fault for fault in kinds if fault.node is not None and fault.node >= max(1, self.nodes)]:
            raise ConfigError(
                f"scenario {self.name!r}: {wrong[0].kind} of node {wrong[0].node}, got nodes: {self.nodes}, expected a node from 0 to"
                f" {max(1, self.nodes) - 1}"
            )
        if not self.small_disk_mib and any(fault.kind == "fill_disk" for fault in kinds):
            raise ConfigError(
                f"scenario {self.name!r}: fill_disk fills a small file system only, got small_disk_mib: 0; add"
                " `small_disk_mib: 64`, or take enospc, which makes writes fail"
            )


MOST_NODES = 256
"""Each is a network namespace."""


def load_scenario(path: Path) -> Scenario:
    """Read a scenario's file. Raises ConfigError that names file, fault, field, what was got and what was expected."""
    where = checked.shown_path(str(path))
    try:
        content = read_yaml_file(path, where)
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file, expected a scenario in YAML (docs/chaos.md has examples)") from None
    return parse_scenario(content, where)


def parse_scenario(content: object, where: str) -> Scenario:
    """Check a scenario's content; `where` is how errors call it. Raises ConfigError."""
    fields = _mapping(content, where)
    _known(fields, where, SCENARIO_FIELDS)
    listed = fields.get("faults")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"{where}: faults: got {checked.shown(listed)}, expected a list of at least one fault; docs/chaos.md lists the kinds"
        )
    faults: list[FaultSpec] = []
    repeat = _whole(fields.get("repeat", 1), where, "repeat", 1)
    count = 0
    for number, entry in enumerate(listed, 1):
        more = _faults(_mapping(entry, f"{where}: fault {number}"), f"{where}: fault {number}", top=True)
        count += repeat * len(more) * (1 + len(more[0].then))
        _check_count(count, where)
        faults += more
    environ = _mapping(fields.get("environ", {}), f"{where}: environ")
    seed = fields.get("seed")
    return Scenario(
        name=_plain(fields.get("name", Path(where).stem), f"{where}: name"),
        seed=random.SystemRandom().randrange(1_000_000) if seed is None else _whole(seed, where, "seed", 0),
        faults=tuple(faults) * repeat,
        deadline_s=_positive(fields.get("deadline_s", 300.0), where, "deadline_s"),
        job_s=_positive(fields.get("job_s", 3600.0), where, "job_s"),
        small_disk_mib=_whole(fields.get("small_disk_mib", 0), where, "small_disk_mib", 0),
        nodes=_whole(fields.get("nodes", 0), where, "nodes", 0, MOST_NODES),
        growth_mib=_positive(fields.get("growth_mib", GROWTH_MIB), where, "growth_mib"),
        environ={_variable(name, where): _plain(value, f"{where}: environ {name}") for name, value in environ.items()},
    )


SCENARIO_FIELDS = (
    "name", "seed", "repeat", "faults", "deadline_s", "job_s", "small_disk_mib", "nodes", "growth_mib", "environ",
)  # fmt: skip
FAULT_FIELDS = (
    "fault", "rank", "count", "step", "after_steps", "after_s", "event", "point", "for_s", "ms", "mib", "call", "times",
    "node", "expect", "then", "repeat", "label",
)  # fmt: skip


def _faults(fields: Mapping[str, Any], where: str, *, top: bool) -> tuple[FaultSpec, ...]:
    """Return the fault as often as its `repeat` says."""
    _known(fields, where, FAULT_FIELDS)
    name = fields.get("fault")
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(f"{where}: fault: got {checked.shown(name)}, expected one of {', '.join(KINDS)}")
    kind = KINDS[name]
    where = f"{where} ({name})"
    for expected in kind.wants:
        if expected not in fields:
            raise ConfigError(f"{where}: no {expected}, expected a number, as {name} means: {kind.text}")
    if not top and "then" in fields:
        raise ConfigError(f"{where}: a `then` within a `then`: list all further faults under the first one")
    ranks, count = _ranks(fields, where, kind)
    point = _point(fields, where, name)
    if "call" in fields and point not in DUMP_POINTS:
        raise ConfigError(
            f"{where}: call: got point {checked.shown(point)}, expected point {' or '.join(DUMP_POINTS)}, whose system calls it counts"
        )
    call_name, _, call = str(fields.get("call", "0")).rpartition(".")
    spec = FaultSpec(
        kind=name,
        ranks=ranks,
        count=count,
        moment=_moment(fields, where, name, top=top),
        point=point,
        for_s=_positive(fields.get("for_s", 0.0), where, "for_s", zero=True),
        ms=_positive(fields.get("ms", 0.0), where, "ms", zero=True),
        mib=_whole(fields.get("mib", 0), where, "mib", 0),
        call=_whole(call, where, "call", 0),
        call_name=call_name,
        times=_whole(fields.get("times", 1), where, "times", 1),
        node=None if "node" not in fields else _whole(fields["node"], where, "node", 0),
        expect=_outcomes(fields.get("expect", ()), where),
        label=str(fields.get("label", "")),
    )
    then: list[FaultSpec] = []
    for number, entry in enumerate(_list(fields.get("then", []), where, "then"), 1):
        inner = f"{where}: then {number}"
        then += _faults(_mapping(entry, inner), inner, top=False)
        _check_count(len(then), where)
    return (replace(spec, then=tuple(then)),) * _whole(fields.get("repeat", 1), where, "repeat", 1, MOST_FAULTS)


def _check_count(count: int, where: str) -> None:
    if count > MOST_FAULTS:
        raise ConfigError(f"{where}: repeat: got {count} faults in all, expected at most {MOST_FAULTS}; lower `repeat`")


def _ranks(fields: Mapping[str, Any], where: str, kind: FaultKind) -> tuple[tuple[int, ...], int]:
    value = fields.get("rank", "random")
    if kind.place in ("node", "agent") and "rank" in fields and "count" not in fields:
        if "node" in fields:
            raise ConfigError(f"{where}: got node and rank, expected one of them, as each selects the node")
        return (_whole(value, where, "rank", 0),), 1  # the node of that rank
    if kind.place not in ("rank", "dump") and ("rank" in fields or "count" in fields):
        raise ConfigError(f"{where}: it hits no rank, got rank: {checked.shown(value)}; leave rank and count out")
    if value == "random":
        return (), _whole(fields.get("count", 1), where, "count", 1)
    if "count" in fields:
        raise ConfigError(
            f"{where}: count beside rank: {checked.shown(value)}: count is for random ranks; leave it out"
        )
    ranks = value if isinstance(value, list) else [value]
    if not ranks or not all(type(rank) is int and 0 <= rank <= LARGEST for rank in ranks):
        raise ConfigError(
            f"{where}: rank: got {checked.shown(value)}, expected a rank from 0, a list of them, or `random`"
        )
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"{where}: rank: got {checked.shown(value)}, expected each rank once; `repeat` says how often"
        )
    return tuple(ranks), len(ranks)


def _moment(fields: Mapping[str, Any], where: str, name: str, *, top: bool) -> Moment:
    ways = [way for way in ("step", "after_steps", "after_s", "event") if way in fields]
    if len(ways) > 1:
        raise ConfigError(f"{where}: got {' and '.join(ways)}, expected one of them, as each selects the moment")
    way = ways[0] if ways else ""
    match way:
        case "step":
            return Moment(step=_whole(fields["step"], where, "step", 1))
        case "after_steps":
            low, high = _range(fields["after_steps"], where, "after_steps")
            return Moment(after_steps=(int(low), int(high)))
        case "after_s":
            return Moment(after_s=_range(fields["after_s"], where, "after_s"))
        case "event":
            event = fields["event"]
            if top:
                raise ConfigError(f"{where}: event {checked.shown(event)} outside of `then`: events are those of another fault, expected step,"
                                  " after_steps or after_s")  # fmt: skip
            if event not in EVENTS:
                raise ConfigError(f"{where}: event: got {checked.shown(event)}, expected one of {', '.join(EVENTS)}")
            return Moment(event=event)
    if name == "corrupt":
        return Moment(event="published")
    if top:
        return Moment(after_steps=(2, 8))
    return Moment(event="freeze_sent")


def _point(fields: Mapping[str, Any], where: str, name: str) -> str:
    allowed = KINDS[name].points
    if "point" not in fields:
        return allowed[0] if allowed else ""
    point = fields["point"]
    if point not in allowed:
        expected = f"one of {', '.join(allowed)}" if allowed else "none: it happens in no rank"
        raise ConfigError(f"{where}: point: got {checked.shown(point)}, expected {expected}")
    return str(point)


def _outcomes(value: object, where: str) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else list(_list(value, where, "expect"))
    if unknown := [entry for entry in listed if entry not in OUTCOMES]:
        raise ConfigError(f"{where}: expect: got {checked.shown(unknown[0])}, expected some of {', '.join(OUTCOMES)}")
    return tuple(listed)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: got {checked.shown(value)}, expected names with values (`fault: kill`)")
    return value


def _list(value: object, where: str, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: {name}: got {checked.shown(value)}, expected a list")
    return value


def _variable(name: str, where: str) -> str:
    """Return the name of a variable as the system takes it."""
    if not name or "=" in name:
        raise ConfigError(
            f"{where}: environ: got the name {checked.shown(name)}, expected one of a variable, without ="
        )
    return name


def _plain(value: object, where: str) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(
            f"{where}: got {checked.shown(value)}, expected a string or a number; write true and false in quotes"
        )
    return str(value)


def _known(fields: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    if unknown := sorted(set(fields) - set(known), key=str):
        raise ConfigError(f"{where}: unknown field {checked.shown(unknown[0])}, expected some of {', '.join(known)}")


def _whole(value: object, where: str, name: str, least: int, most: int = LARGEST) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    try:
        return checked.integer(value, name, least, most)
    except checked.Invalid as error:
        raise ConfigError(f"{where}: {error}") from None


def _positive(value: object, where: str, name: str, *, zero: bool = False) -> float:
    try:
        number = checked.number(value, name, 0, LONGEST_S)
    except checked.Invalid as error:
        raise ConfigError(f"{where}: {error}") from None
    if not number and not zero:
        raise ConfigError(f"{where}: {name}: got 0, expected a number above 0")
    return number


def _range(value: object, where: str, name: str) -> tuple[float, float]:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2:
        raise ConfigError(f"{where}: {name}: got {checked.shown(value)}, expected a number, or [least, most]")
    low, high = (_positive(end, where, name, zero=True) for end in ends)
    if low > high:
        raise ConfigError(f"{where}: {name}: got {checked.shown(value)}, expected [least, most] with least <= most")
    return low, high
