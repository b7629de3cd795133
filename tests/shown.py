"""The commands that the documents show, and which of a command's words say what it runs.

Owns the collecting of commands: from README.md and docs/, from the module docstrings of the packages, the benchmarks and the examples,
and from the comment that a script or a manifest of the examples begins with. What proves each stands in `tests/proofs.py`.

A command is a line of a fenced or indented block, or a piece of inline code, that begins with one of PROGRAMS. What stands behind
`  # ` or three spaces explains it and is left out, and so are settings before it (`ENABLE_TTP=False python ...`) and an ellipsis at
its end. The beginning of another command (`ttp ckpt`) needs no proof.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ttp.cli import TOOLS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ttp", "controller", "processor", "trainer", "proto", "benchmarks", "examples")
"""Folders whose modules' docstrings are documentation."""
COMMENTED = ("*.sh", "*.sbatch", "*.yaml")
"""Files of the examples that begin with a comment."""
PROGRAMS = {
    "bash": "bash",
    "kubectl": "kubectl",
    "make": "make",
    "pip": "pip",
    "python": "",
    "python3": "",
    "sbatch": "sbatch",
    "scancel": "scancel",
    "source": "source",
    "srun": "srun",
    "torchrun": "torch.distributed.run",
    "ttp": "",
    "ttprun": "ttp.launch",
}
"""What tests say for each: its name, or a module; nothing where the words behind it say what is run."""
SCRIPTS = (".py", ".sh", ".sbatch", ".yaml")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_SHELL = ("", "bash", "console", "sh", "shell")
_SETTING = re.compile(r"[A-Z_]+=\S*")
_ASIDE = re.compile(r"(?: \.\.\.)?(?:\s+# .*|\s{3,}.*)?$")
_NAME = re.compile(r"[a-z][a-z_-]*")
_COMMENT = re.compile(r"#!.*\n((?:#.*\n)+)|((?:#.*\n)+)")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_OPTIONAL = re.compile(r"\[[^]]*\]")


def documents() -> dict[str, str]:
    """Return the text of every document by its path."""
    found = {path: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            docstring = _DOCSTRING.match(path.read_text(encoding="utf-8"))
            found[path] = docstring[1] if docstring else ""
    for path in (path for kind in COMMENTED for path in (ROOT / "examples").rglob(kind)):
        comment = _COMMENT.match(path.read_text(encoding="utf-8"))
        found[path] = re.sub("^#", "  ", comment[1] or comment[2], flags=re.MULTILINE) if comment else ""
    return {path.relative_to(ROOT).as_posix(): text for path, text in sorted(found.items())}


def shown(text: str) -> list[str]:
    """Return the commands that a document shows, each once, in order."""
    found: dict[str, None] = {}
    prose = _FENCE.sub("\n", text)
    for language, block in _FENCE.findall(text):
        if language in _SHELL:
            found |= dict.fromkeys(_lines(block))
    for block in _INDENTED.findall(prose):
        found |= dict.fromkeys(_lines(block))
    for code in _CODE.findall(_INDENTED.sub("\n", prose)):
        found |= dict.fromkeys(_lines(" ".join(code.split())))
    return list(found)


def _lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = _ASIDE.sub("", line.strip().removeprefix("$ "))
        words = line.split()
        while words and _SETTING.fullmatch(words[0]):
            words = words[1:]
        if len(words) > 1 and words[0] in PROGRAMS:
            yield line[line.index(words[0]) :].strip()


def all_shown() -> dict[str, list[str]]:
    """Return every command of all documents, with the documents that show it."""
    found: dict[str, list[str]] = {}
    for document, text in documents().items():
        for command in shown(text):
            found.setdefault(command, []).append(document)
    return found


def is_beginning(command: str, others: list[str]) -> bool:
    """True for `ttp ckpt` where `ttp ckpt list ...` is there: a name, not a command."""
    return any(other.startswith(command + " ") for other in others)


def without_options(command: str) -> str:
    """Return a command without what is in brackets."""
    return _OPTIONAL.sub("", command)


def options(command: str) -> list[str]:
    """Return the flags that a command shows in brackets."""
    return re.findall(r"--[a-z-]+(?![\w.-])", " ".join(_OPTIONAL.findall(command)))


def decisive(command: str) -> list[str]:
    """Return the words that say what a command runs: programs, modules and what they are to do, scripts, flags."""
    words = shlex.split(without_options(command))
    found = []
    for place, word in enumerate(words):
        if word in PROGRAMS:
            found.append(PROGRAMS[word])
        elif place == 1 and words[0] == "ttp":
            found.append(TOOLS[word].module)
        elif word.startswith("--") or words[place - 1] == "-m" or words[0] == "make":
            found.append(word.partition("=")[0])
        elif word.endswith(SCRIPTS):
            found.append(word.removeprefix("examples/").removeprefix("./"))
        elif (words[0] in ("pip", "ttp") or words[place - 2] == "-m") and place < 4 and _NAME.fullmatch(word):
            found.append(word)
    return [word for word in dict.fromkeys(found) if word.strip("-")]


def says(text: str, word: str) -> bool:
    """True where a text has the word, and not only as a part of a longer one."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None
