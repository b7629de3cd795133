"""What a rehearsal has shown, kept beside the checkpoints: that this program's training function can be entered again, or that it cannot.

A result is that of one script, with the modules that belong to it, one TTP, one torch and one layout of ranks: whatever of these changes, the function
has to be rehearsed again. Owns the file `rehearsal.json` in the job's checkpoint directories. What stands there comes from outside: it is checked as it is
read, and a file that is none is named and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ttp import files
from ttp.errors import NotAsBefore
from ttp.exchange.agreed import agree, of_this_rank
from ttp.exchange.imported_modules import INSTALLED
from ttp.exchange.json_collectives import broadcast_json
from ttp.inputs import checked
from ttp.inputs.input_file import open_regular, read_json
from ttp.version import VERSION

log = logging.getLogger("ttp")

NAME = "rehearsal.json"
FORMAT = 1
MOST_BYTES = 1 << 20
MOST_RESULTS = 32
"""Of other layouts and scripts: the oldest go."""
_LONGEST = 500
"""Characters of a reason."""
HOW = "run the job's first steps once with TTP_REHEARSE=every:3 (docs/rehearsal.md)"


@dataclass(frozen=True, slots=True)
class RehearsedProgram:
    """What a result holds for."""

    script: str
    """SHA-256 of the script and of the modules beside it that were imported as the session began; empty: no file is known."""
    ttp: str
    torch: str
    layout: str
    """SHA-256 of the number of ranks, their device and what the manifest says of the layout."""


@dataclass(frozen=True, slots=True)
class Result:
    program: RehearsedProgram
    step: int
    unequal: str
    """What differed in `step`, the second time; empty: nothing did."""


def this_program(world_size: int, device: str, layout: str) -> RehearsedProgram:
    """Return what this process runs."""
    shape = hashlib.sha256(json.dumps([world_size, device, layout]).encode()).hexdigest()
    return RehearsedProgram(_hash_script(), VERSION, torch.__version__, shape)


def agreed_program(world_size: int, device: torch.device, layout: str) -> RehearsedProgram:
    """Return what rank 0 runs: on other ranks other modules may be imported, or the layout be another part's (all ranks call). Raises NotAsBefore in a
    process that takes a lost one's place and runs something else than that one did."""
    mine = this_program(world_size, device.type, layout)
    runs = {"script": mine.script, "ttp": mine.ttp, "torch": mine.torch}
    before = of_this_rank("program", runs)
    if changed := [name for name, value in runs.items() if before[name] != value]:
        files = "the script, or a module of its own that it imports, was" if "script" in changed else "versions were"
        raise NotAsBefore(
            f"this process takes a lost one's place, and {files} changed on this node since the job began ({', '.join(changed)}): this rank would"
            " train with other code than the others. This process ends; a restart takes what is there now on all ranks"
        )
    return RehearsedProgram(**agree("rehearsed program", lambda: broadcast_json(asdict(mine), device)))


def _hash_script() -> str:
    digest = hashlib.sha256()
    named = sorted(_own_modules())
    for name, path in named:
        digest.update(f"{name}\0".encode())
        try:
            with open_regular(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            digest.update(b"?")
    return digest.hexdigest() if any(name == "__main__" for name, _ in named) else ""


def _own_modules() -> Iterator[tuple[str, str]]:
    """Yield name and file of the script and of what it has imported, but for installed packages, TTP's own and Python's."""
    library = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path:
            continue
        own = not any(folder in path for folder in INSTALLED) and not path.startswith(library)
        if own or name == "__main__":
            yield name, path


def read(directory: str | os.PathLike[str]) -> list[Result]:
    """Return the results that are kept in a directory, oldest first. Raises ValueError naming what is not as expected, OSError."""
    try:
        content = checked.mapping(read_json(Path(directory) / NAME, MOST_BYTES), "")
    except FileNotFoundError:
        return []
    checked.integer(*checked.field(content, "format", ""), FORMAT, FORMAT)
    return [_result(item, where) for item, where in checked.items(*checked.field(content, "results", ""))]


def _result(value: object, path: str) -> Result:
    content = checked.mapping(value, path)
    names = [field.name for field in fields(RehearsedProgram)]
    program = RehearsedProgram(*(checked.string(*checked.field(content, name, path)) for name in names))
    unequal = checked.string(*checked.field(content, "unequal", path))
    return Result(program, checked.integer(*checked.field(content, "step", path)), unequal)


class KeptResults:
    """Those of one program, in the directories of one attempt."""

    def __init__(self, directories: Sequence[str], program: RehearsedProgram, attempt: int) -> None:
        self._directories, self._program, self._attempt = tuple(directories), program, attempt
        self._passed = self._failed = False

    def why_not(self) -> str:
        """Return why training may not be entered again: no rehearsal has shown that it can be. Empty: one has."""
        if not self._program.script:
            return f"no rehearsal of this program can be kept, because it has no file: put it into a script, and {HOW}"
        results = [result for directory in self._directories for result in self._read(directory)]
        mine = [result for result in results if result.program == self._program]
        if not mine:
            return f"train() was not rehearsed{self._changed(results)}: {HOW}"
        if failed := [result for result in mine if result.unequal]:
            return f"train() cannot be entered again, as the rehearsal of step {failed[-1].step} has shown: {checked.shown(failed[-1].unequal)}"
        return ""

    def _changed(self, results: Sequence[Result]) -> str:
        """Name what changed since the newest rehearsal, if there was one."""
        if not results:
            return " yet"
        was, now = asdict(results[-1].program), asdict(self._program)
        different = [name for name in was if was[name] != now[name]]
        words = {"script": "another script", "layout": "another layout of ranks"}
        return " with " + " and ".join(
            words.get(name, f"{name} {checked.shown(now[name])} (but {checked.shown(was[name])})") for name in different
        )

    def passed(self, step: int) -> None:
        """Step `step` was computed twice with equal results. What another attempt of this job has found to be unequal stays so."""
        if self._passed or self._failed:
            return
        self._passed = True
        results = self._read(self._directories[0])
        if self._attempt and any(result.program == self._program and result.unequal for result in results):
            return
        self._keep(results, Result(self._program, step, ""))

    def failed(self, step: int, unequal: str) -> None:
        """It gave another result the second time, or none."""
        self._failed = True
        self._keep(self._read(self._directories[0]), Result(self._program, step, unequal[:_LONGEST]))

    def _keep(self, results: Sequence[Result], result: Result) -> None:
        others = [other for other in results if other.program != self._program]
        kept = [*others, result][-MOST_RESULTS:]
        rows = [{**asdict(each.program), "step": each.step, "unequal": each.unequal} for each in kept]
        try:
            files.replace(Path(self._directories[0]) / NAME, json.dumps({"format": FORMAT, "results": rows}, indent=1))
        except (OSError, UnicodeEncodeError) as error:
            log.warning("the rehearsal's result is not kept: %s", error)

    def _read(self, directory: str) -> list[Result]:
        try:
            return read(directory)
        except (OSError, ValueError) as error:
            log.warning("ignoring %s: %s. Remove it, and rehearse again", Path(directory) / NAME, error)
            return []
