"""Trying a mutant: what is run on it, and how it is put in the place of the shipped code.

Everything is imported, collected and measured once. Each mutant is tried in a process that is forked from that: the functions
that it changes get its code, and then the checks run that come to the changed line, the short ones first, until one fails. Owns the
order and the limits; never says what is right: the tests and the invariants do.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from tests.simulation.mutants.changes import MODULES, Mutant, changed, file_of

MORE_CPU_S = 5
MORE_OFTEN = 10
"""A check on a mutant may take so many times the processor time that it takes on the shipped code, and this many seconds more."""
LONGEST_CHECK_S = 120
"""Of anybody's time: for a check that waits and computes nothing."""
MOST_MEMORY_BYTES = 4 << 30
"""More than the process has that it is forked from."""

IMPORT = -1
"""Sent instead of a check's number: the changed module cannot even be imported."""
Plain = (bool, int, float, str)


@dataclass(frozen=True)
class Check:
    """One test, or one simulated job."""

    name: str
    run: Callable[[], bool]
    """True: as it should be. Whatever it raises, it noticed something."""


@dataclass
class Measured:
    """A check on the shipped code."""

    check: Check
    cpu_s: float
    lines: dict[str, frozenset[int]]
    """The lines that it runs, by module."""

    def comes_to(self, mutant: Mutant) -> bool:
        """True when it runs the statement that is changed; outside of all functions every check may see it."""
        if not mutant.function:
            return True
        return not self.lines.get(mutant.module, frozenset()).isdisjoint(range(mutant.first, mutant.last + 1))


@dataclass
class Bench:
    """All checks, and what was learned of them."""

    checks: list[Measured]
    """The short ones first."""
    quick: dict[tuple[str, str], list[Measured]] = field(default_factory=dict)
    """By function, the checks that caught a mutant of it, the latest first: they are likely to catch the next one."""

    def tried(self, mutant: Mutant) -> str:
        """Return what caught a mutant; empty: it survived. Raises RuntimeError when it could not be put in."""
        key = (mutant.module, mutant.function)
        known = self.quick.setdefault(key, [])
        order = [one for one in known if one.comes_to(mutant)]
        order += [one for one in self.checks if one.comes_to(mutant) and one not in known]

        def trial(tell: Callable[[object], None]) -> None:
            if not put_in(mutant):
                tell(IMPORT)
                return
            for place, measured in enumerate(order):
                tell(place)
                limit_cpu(measured.cpu_s)
                if not _holds(measured.check):
                    return
            tell(len(order))

        results, status = forked(trial)
        if not results:
            raise RuntimeError(f"{mutant.name}: {mutant.change} at {mutant.place} could not be put in: status {status}")
        if results[-1] == IMPORT:
            return "its import"
        if results[-1] == len(order):
            return ""
        caught = order[results[-1]]
        if caught in known:
            known.remove(caught)
        known.insert(0, caught)
        return f"{caught.check.name}{'' if status == 0 else ' (did not end)'}"


def measured(checks: Iterable[Check], longest_s: float = math.inf) -> Bench:
    """Run every check on the shipped code, in a process of its own, and leave out those that take longer.

    Raises RuntimeError when one fails there.
    """
    listed = list(checks)

    def trial(tell: Callable[[object], None]) -> None:
        modules = {id(code): module for module, code in _codes()}
        for place, check in enumerate(listed):
            seen: dict[str, set[int]] = {module: set() for module in MODULES}
            began = time.process_time()
            tracer = _tracer(modules, seen)
            sys.settrace(tracer)
            threading.settrace(tracer)  # a check's threads begin after this
            try:
                held = _holds(check)
            finally:
                sys.settrace(None)
                threading.settrace(None)
            tell(
                (
                    place,
                    time.process_time() - began,
                    {name: frozenset(lines) for name, lines in seen.items() if lines},
                    held,
                )
            )

    results, status = forked(trial)
    failed = [listed[place].name for place, _, _, held in results if not held]
    if failed or len(results) < len(listed):
        raise RuntimeError(f"the shipped code fails {failed or listed[len(results)].name}, status {status}")
    known = [Measured(listed[place], cpu_s, lines) for place, cpu_s, lines, _ in results]
    return Bench(sorted((one for one in known if one.cpu_s <= longest_s), key=lambda one: one.cpu_s))


def _tracer(modules: dict[int, str], seen: dict[str, set[int]]) -> Callable[[FrameType, str, object], Any]:
    """Return a trace function that notes the lines of these codes."""

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        module = modules.get(id(frame.f_code))
        if module is None:
            return None
        lines = seen[module]
        lines.add(frame.f_lineno)

        def line(frame: FrameType, event: str, arg: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    return enter


def _holds(check: Check) -> bool:
    try:
        return check.run()
    except BaseException:  # whatever it is, it was noticed
        return False


def limit_cpu(cpu_s: float) -> None:
    """The process ends when the check that begins now takes much longer than it does on the shipped code."""
    used = time.process_time()
    limit = math.ceil(used + MORE_CPU_S + MORE_OFTEN * cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    signal.alarm(LONGEST_CHECK_S)


def forked(work: Callable[[Callable[[object], None]], None]) -> tuple[list[Any], int]:
    """Do it in a process of its own; return its results, and its status."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            most = _mapped_bytes() + MOST_MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            with os.fdopen(write_end, "wb", buffering=0) as pipe:

                def tell(value: object) -> None:
                    pipe.write(pickle.dumps(value))

                work(tell)
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    results = []
    with os.fdopen(read_end, "rb") as answers:
        while True:
            try:
                results.append(pickle.load(answers))
            except EOFError:
                break
    _, status = os.waitpid(pid, 0)
    return results, status


def _mapped_bytes() -> int:
    """Return how much address space this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


# --- the code ---


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    """Return a module's own functions by name, `Class.method` for those of its classes."""
    found: dict[str, FunctionType] = {}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            found[name] = value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, method in vars(value).items():
                plain = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if isinstance(plain, FunctionType):
                    found[f"{name}.{inner}"] = plain
    return found


def _codes() -> Iterable[tuple[str, CodeType]]:
    """Yield (module, code) of every function that can be changed, and of what is nested in it."""
    for module in MODULES:
        for function in _functions(importlib.import_module(f"ttp.{module}")).values():
            todo = [function.__code__]
            while todo:
                code = todo.pop()
                yield module, code
                todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def put_in(mutant: Mutant) -> bool:
    """Give the mutant's code, defaults and constants to the module that everybody has imported; False: it raises at import.

    Raises AssertionError when nothing differs: then it would be the shipped code that is tried.
    """
    name = f"ttp.{mutant.module}"
    module, made = importlib.import_module(name), ModuleType(name)
    made.__dict__.update(__package__=module.__package__, __file__=module.__file__)
    sys.modules[name] = made  # a dataclass looks there
    try:
        exec(compile(changed(mutant), str(file_of(mutant.module)), "exec"), made.__dict__)
    except MemoryError:
        raise
    except Exception:
        return False
    sys.modules[name] = module
    differ = 0
    new = _functions(made)
    for key, function in _functions(module).items():
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            other = getattr(new[key], attribute)
            if _differs(getattr(function, attribute), other):
                setattr(function, attribute, other)
                differ += 1
    for key, value in list(vars(module).items()):
        if isinstance(value, Plain) and not key.startswith("__") and _differs(value, made.__dict__[key]):
            _rebind(key, value, made.__dict__[key])
            differ += 1
    if not mutant.function and _fills_a_table(module, made):
        differ += 1
    assert differ, f"{mutant.name}: {mutant.change} at {mutant.place} changes nothing"
    return True


def _fills_a_table(module: ModuleType, made: ModuleType) -> bool:
    """Say whether both have a dict of another module: the mutant has filled it anew as it was imported."""
    return any(
        isinstance(value, dict) and value is made.__dict__.get(key) and not key.startswith("__")
        for key, value in vars(module).items()
    )


def _differs(old: object, new: object) -> bool:
    if isinstance(old, CodeType):
        return old != new
    return repr(old) != repr(new) and " at 0x" not in repr(old)


def _rebind(name: str, old: object, new: object) -> None:
    """Change a constant in its module and in all that have imported it."""
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(("ttp.", "tests.")) and other.__dict__.get(name) == old:
            other.__dict__[name] = new
