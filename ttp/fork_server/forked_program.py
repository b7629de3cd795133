"""A forked process: from the fork to the last line of its program, as if an interpreter had been started for it.

Owns what a new interpreter has and a fork lacks: session, streams, variables, arguments, path, a `__main__` of its own, random numbers of its
own. Nothing of the agent's protocol is here.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from ttp.fork_server.linux import show_as
from ttp.fork_server.preload import BY_INTERPRETER, was_read

ENDED = "ended with exit status "
CANNOT_OPEN = 2
"""Exit status of an interpreter whose script cannot be read."""

_forked = False


def is_forked() -> bool:
    """Return whether this process, or one that it was forked from, is a fork server's."""
    return _forked


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """What a forked process is to run."""

    argv: list[str]
    """The interpreter, `-u` or `-P`, then `-m` and a module, or a script; its arguments."""
    adopted: bool
    """The agent is its parent, and reads its exit status; else it writes that, if not 0, into its stdout."""

    @classmethod
    def become(
        cls, request: dict[str, Any], own: Sequence[int], others: Sequence[int], held: int, agent: int
    ) -> ForkedProgram:
        """Make the forked process what a new one would be, before any code of the user's.

        own: its stdin, stdout and stderr. others: descriptors that are not its own. held: a pipe with a byte for this process once its
        server has answered. agent: the one that has adopted it by then.
        """
        global _forked
        _forked = True
        os.setsid()
        for descriptor in others:
            os.close(descriptor)
        for number, descriptor in enumerate(own):
            os.dup2(descriptor, number)
            os.close(descriptor)
        released = os.read(held, 1)
        os.close(held)
        if not released:
            os._exit(1)  # the server has ended, or whoever asked has: no process waits for this one
        if request["adopted"] and os.getppid() != agent:
            os._exit(1)  # it is gone, and no other process would end this one
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environ"])
        show_as(request["argv"], request["environ"])
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()  # Python's own generator does so by itself, and torch begins with a fixed seed
        if (error_file := sys.modules.get("ttp.exchange.error_file")) is not None:
            error_file.install_in_worker()  # as `import ttp` does
        return cls(request["argv"], request["adopted"])

    def run(self) -> None:
        """Run the program. Returns when it ends; raises SystemExit, KeyboardInterrupt."""
        try:
            self._run()
        except SystemExit as ended:
            if ended.code and not self.adopted:
                with contextlib.suppress(OSError):  # the reader has gone
                    os.write(1, f"{ENDED}{ended.code if isinstance(ended.code, int) else 1}\n".encode())
            raise

    def _run(self) -> None:
        program = self.argv[2:]
        sys.orig_argv = list(self.argv)
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={})
        sys.modules["__main__"] = main
        _loaded_with.update(os.environ)
        sys.addaudithook(_warn_of_late_variable)
        try:
            if program[0] == "-m":
                sys.argv = ["-m", *program[2:]]
                if self.argv[1] != "-P":
                    _first_on_path(os.getcwd())
                _forget_preloaded(program[1])
                runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
            else:
                sys.argv = list(program)
                _first_on_path(os.path.dirname(os.path.realpath(program[0])))
                _run_script(os.path.abspath(program[0]), main)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            error.__traceback__ = _of_the_program(error.__traceback__)
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)


def _forget_preloaded(name: str) -> None:
    """Drop the module that is to run as `__main__`, where it was preloaded: runpy would warn of the second copy."""
    for module in (name, f"{name}.__main__"):
        if module in sys.modules and not hasattr(sys.modules[module], "__path__"):
            del sys.modules[module]


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _run_script(path: str, main: ModuleType) -> None:
    """Run a script as `__main__`."""
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_OPEN)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Leave this module's own frames out of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


_loaded_with: dict[str, str] = {}
"""The variables with which the program began, those of the libraries that are loaded among them."""


def _warn_of_late_variable(event: str, arguments: tuple[Any, ...]) -> None:
    """Warn of a variable that the script sets for a library that has been loaded before (an audit hook: called for every event)."""
    if event != "os.putenv":
        return
    name, value = (os.fsdecode(argument) for argument in arguments)
    if name.startswith(BY_INTERPRETER) or value in (os.environ.get(name), _loaded_with.get(name)):
        return
    if was_read(name):
        print(
            f"ttp: {name}={value} was set after the libraries that read it were imported: it has no effect here. Set it before ttprun"
            " starts, or set TTP_WARM_START=False",
            file=sys.stderr,
        )
