"""The language of the tree: phrases that are not used in messages, names, docstrings, comments and documents.

Owns the phrases, each with its plain wording, what is allowed where it is meant, and the folders that are not held to it yet.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.rooms import FOLDERS, ROOT, python_files

PROCESS = r"(ranks?|controllers?|launchers?|agents?|processors?|peers?|workers?|standbys?|holders?|nodes?)"

PHRASES = {
    r"wanted": "expected",
    r"told|tells": "reported, received, logged; shows, distinguishes",
    r"hears?|heard": "receives, received",
    rf"{PROCESS} (says?|said)": "reports, logs, orders",
    r"nobody": "no rank, no process, no reader",
    r"befell|befalls?": "affected",
    r"gets? on|got on|getting on": "progresses",
    r"blows?": "injection",
    r"hurts?": "under faults, faulted",
    r"laps?": "run",
    r"unbroken": "baseline, uninterrupted",
    r"story|stories": "incident report",
    r"notice of SIGTERM|SIGTERM notice": "preemption notice",
    r"stands? at|stood at": "is at",
    r"(lies|lie|lay|lying) (on|at|beside|under)": "is stored on",
    r"(is|are|was) left(?! (out|of|alone))": "remains",
    r"in words": "as text, spelled out",
    r"(is no|is a|as a|or a|expected|expected a) text": "string",
    r"for nothing": "without effect, without a new step",
    r"in peace": "undisturbed: say what is not done",
    r"insists?|insisted|insisting": "repeats",
    r"forgive[sn]?|forgave|forgiving": "extend, renew",
    r"bury|buried|buries": "mark as dead",
    r"amnesty": "renewal of all leases",
    r"aside": "to another name, in a thread",
    r"hindsight": "correction",
    r"going on after step": "resumed from PATH at step N",
    r"training goes on": "training continues",
    r"on the controller's word": "on the controller's order",
    r"whole numbers?": "integer",
    r"(in|of|since|with) start \d+|start \d+(?=:)|start %d": "attempt N",
    r"(this|each|every|next|later|earlier|newest|futile) starts?|starts in a row": "attempt",
    r"(in|of|over|for) (a start|one start|all starts)": "attempt",
    r"(?<!there )(?<!where )(?<!but )(is|are|was) no (?!longer|more|less|rank|such)": "is not a",
}
"""What goes -> what to write. Regular expressions over whole words; in a name, its words count."""

ANY = re.compile(rf"\b({'|'.join(PHRASES)})\b".lower())
"""Most lines have none of them. For text in lower case: that is found several times as fast as any case."""

ONLY_TEXT = {
    r"(is|are|was) left(?! (out|of|alone))",
    r"in words",
    r"(is no|is a|as a|or a|expected|expected a) text",
    r"aside",
}
"""These may be parts of names."""

ALLOWED = {
    r"\"(amnesty|heard|told)\"": "keys of journals, which old ones have",
    r"\bforgiven\b": "a key of manifests, which old checkpoints have",
    r"\"(laps?|blows)\"|\blaps?,|\blap:|\blap_|\"(--)?unbroken(\.json)?\"|\|unbroken": "keys of result.json, names of a campaign's files and an option, which older ones have",
    r"(kill|segv|\{\}) in a start": "a kind of the matrix of faults, by which its results are found",
    r"story\.jsonl|--ttp-story|ttp_story": "the file keeps its name and the option too",
}
"""Plain English, or a name that others use, in its place -> why."""

ALLOWED_NAMES = {
    "forgiven": "a key of manifests",
    "heard_s": "a key of journals",
    "next_start": "of the key `start` in manifests of parts",
    "futile_starts": "of the option --ttp-futile-starts",
    "ttp_futile_starts": "the same",
    "FUTILE_STARTS": "the same",
    "ttp_story": "of the option --ttp-story",
    "story": "in tests: the lines of story.jsonl",
    "story_file": "the module of story.jsonl",
}

BRACES = re.compile(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}")
"""What an f-string fills in: code, whose names are found where they are made."""

RECORDS = ROOT / "docs" / "decisions"
"""Decisions keep the words of their day: a record of the past is not rewritten."""


class Found(NamedTuple):
    """A piece of language: where it is, and what kind of text."""

    line: int
    kind: str
    text: str


def of_python(source: str) -> Iterator[Found]:
    """Yield the messages, docstrings, comments and names of a Python file, line by line."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docstrings = {node.lineno for node in statements if isinstance(node.value, ast.Constant)}
    names = set(ALLOWED_NAMES)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, kind = token.start[0], tokenize.tok_name[token.type]
        if kind == "NAME" and token.string not in names:
            names.add(token.string)
            yield Found(line, "test name" if token.string.startswith("test_") else "name", words_of(token.string))
        elif kind == "COMMENT":
            yield Found(line, "comment", token.string)
        elif kind in ("STRING", "FSTRING_MIDDLE"):
            kind = "docstring" if line in docstrings else "message"
            for number, text in enumerate(token.string.splitlines()):
                yield Found(line + number, kind, BRACES.sub("{}", text) if token.string[0] in "fr" else text)


def words_of(name: str) -> str:
    """Return the words of a name: `ReportedStep`, `step_told` -> `step told`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name).strip().lower()


def of_markdown(source: str) -> Iterator[Found]:
    """Yield the headings and the prose of a document; what is quoted as code keeps its own words."""
    quoted = False
    for number, text in enumerate(source.splitlines(), 1):
        if text.lstrip().startswith("```"):
            quoted = not quoted
        elif not quoted:
            yield Found(number, "heading" if text.startswith("#") else "prose", re.sub(r"`[^`]*`", "`", text))


def violations(path: Path, source: str) -> Iterator[str]:
    """Yield each phrase of a file that goes, with its place, its kind and what to write."""
    if not (ANY.search(source.lower()) or ANY.search(words_of(source))):  # it is not taken apart
        return
    for line, kind, text in of_markdown(source) if path.suffix == ".md" else of_python(source):
        if ANY.search(text.lower()):
            held = re.sub("|".join(ALLOWED), "", text)
            for phrase, plain in PHRASES.items():
                if phrase not in ONLY_TEXT or "name" not in kind:
                    for hit in re.finditer(rf"\b({phrase})\b", held, re.IGNORECASE):
                        yield f"{path}:{line}: {kind}: {hit[0]!r}: write {plain}"


def held_files() -> list[Path]:
    """Return the files that are held to the language."""
    python = [p for folder in (*FOLDERS, "tests", "benchmarks", "examples") for p in python_files(folder)]
    documents = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [p for p in (*python, *documents) if p != Path(__file__) and RECORDS not in p.parents]


def test_no_phrase_that_goes_is_in_the_tree() -> None:
    """Messages, names, docstrings, comments, headings and prose are in the field's own words."""
    found = [hit for p in held_files() for hit in violations(p.relative_to(ROOT), p.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_every_kind_of_text_is_read() -> None:
    """One phrase in each place, by file, line and kind; what an f-string fills in is code."""
    source = '"""Nobody."""\n\n\ndef test_nobody(amnesty=1):\n    # in peace\n    raise E(f"{wanted} is no list")\n'
    found = [hit.rpartition(": write")[0] for hit in violations(Path("a.py"), source)]
    assert found == [
        "a.py:1: docstring: 'Nobody'",
        "a.py:4: test name: 'nobody'",
        "a.py:4: name: 'amnesty'",
        "a.py:5: comment: 'in peace'",
        "a.py:6: message: 'is no '",
    ]
    prose = "# Nobody\n\nA rank is told `nobody`.\n\n```\nnobody\n```\n"
    assert [hit.split(": ")[:2] for hit in violations(Path("a.md"), prose)] == [
        ["a.md:1", "heading"],
        ["a.md:3", "prose"],
    ]


def test_what_is_excepted_is_there() -> None:
    """An exception that nothing needs any more goes."""
    held = [p.read_text(encoding="utf-8") for p in held_files()]
    assert [each for each in ALLOWED if not any(re.search(each, text) for text in held)] == []
    assert [each for each in ALLOWED_NAMES if not any(re.search(rf"\b{each}\b", text) for text in held)] == []
