"""Every small change that a module allows: a comparison turned round, a condition always true, a field forgotten, an effect
left out.

Owns the making of mutants, always in the same order. What they are tried on, `trial` says.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    *(f"controller.core.{name}" for name in (
        "facts.decision", "facts.coverage", "dump.freeze", "stages", "machine", "dump.roll_forward", "dump.regroup", "dump.lost_nodes", "dump.writing", "dump.publishing",
        "facts.divergence", "facts.planning", "facts.membership", "ranks.liveness", "ranks.generations", "ranks.takeover", "dump.finish", "dump.reassign", "ranks.stall",
        "facts.pace", "transitions", "facts.per_rank", "facts.answers", "ranks.repeats", "ranks.standbys", "facts.state",
    )),
    "controller.handler",
    *(f"processor.core.{name}" for name in ("orders", "freezes", "transitions", "machine", "failover", "step_times", "refusals", "state", "causes")),
    *(f"processor.{name}" for name in ("gate", "freeze_state", "step_boundary", "handler", "worker", "starting")),
    *(f"proto.{name}" for name in ("fence", "limits", "names")),
)  # fmt: skip
"""The machines with all that they import, and what of the adapters the simulation runs."""
LEFT_OUT = {
    "controller.core.facts.events": "fields, whose defaults are settings that every job overrides",
    "processor.core.events": "fields, whose defaults are settings that every job overrides",
    "proto.messages": "fields",
    "proto.cause": "fields",
    "proto.shares": "fields",
    "proto.hang_limits": "fields, whose defaults are settings that jobs with hangs override",
    "proto.incident": "fields",
    "controller.core.facts.incident": "what is reported of a fault, by which nothing is decided: I15 judges it",
    "controller.core.facts.stage_table": "the shape of the tables that `controller.core.transitions` fills",
    "proto.frozen": "dataclasses, made faster",
    "controller.agent_link": "the launcher's: a thread, a stream and a clock around calls, which tests of agents drive",
    "proto.stream": "a caller's threads and streams, which tests of streams drive; the simulated relays have its times",
    "proto.codec": "not of the machines: the simulation uses its envelopes only",
}
"""Modules that have no mutants although the machines or the simulation import them, and why."""
Change = Callable[[Any], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one module: the `index`-th of all that it allows."""

    module: str
    index: int
    function: str
    """The outermost function that it is in, `Class.method` for a method; empty: in none, or in a default argument."""
    line: int
    first: int
    """The first line of its statement."""
    last: int
    """The last line of its statement; of one with a body, of what stands before the body."""
    source: str
    """That line as it is written."""
    change: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.index}"

    @property
    def place(self) -> str:
        return f"{file_of(self.module).relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class _Node:
    """A node that may be changed."""

    node: ast.AST
    function: str
    first: int
    last: int
    """Lines of the statement that it is in."""


def file_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


@cache
def mutants_of(module: str) -> tuple[Mutant, ...]:
    """Return every mutant of a module."""
    lines = file_of(module).read_text(encoding="utf-8").splitlines()
    made, seen = [], Counter[tuple[int, str]]()
    for index, (place, at, text, _) in enumerate(_changes(module)):
        seen[at.lineno, text] += 1
        count = seen[at.lineno, text]
        change = text if count == 1 else f"{text} (no. {count} in the line)"
        first, last = _lines(at) if isinstance(at, ast.stmt) else (place.first, place.last)
        source = lines[at.lineno - 1].strip()
        made.append(Mutant(module, index, place.function, at.lineno, first, last, source, change))
    return tuple(made)


def named(names: Sequence[str]) -> list[Mutant]:
    """Return these mutants, in the order of their modules. Raises ValueError naming those that do not exist."""
    every = [mutant for module in MODULES for mutant in mutants_of(module)]
    if unknown := sorted(set(names).difference(mutant.name for mutant in every)):
        raise ValueError(f"no mutant {', '.join(unknown)}; python -m tests.simulation.mutants --list names them all")
    return [mutant for mutant in every if mutant.name in names]


def changed(mutant: Mutant) -> ast.Module:
    """Return the mutant's whole module."""
    place, _, _, change = _changes(mutant.module)[mutant.index]
    tree, node = copy.deepcopy((_tree(mutant.module), place.node))
    change(node)
    return ast.fix_missing_locations(tree)


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


@cache
def _changes(module: str) -> tuple[tuple[_Node, Any, str, Change], ...]:
    """Return (node, the node that is named as the place, what is changed, how) of every mutant of a module."""
    return tuple((place, *variant) for place in _nodes(_tree(module), "", (0, 0)) for variant in _variants(place.node))


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
    if isinstance(statement, ast.While):
        last = statement.body[0].lineno  # the line of `while True` itself is never run
    return statement.lineno, max(statement.lineno, last or 0)


def _nodes(node: ast.AST, function: str, lines: tuple[int, int]) -> Iterator[_Node]:
    """Yield the nodes that may be changed: annotations, types, decorators, texts and fields of journals are left alone."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Journal", "TypeVar"):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    inner = function
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not function.endswith("()"):
        inner = f"{function}{'.' if function else ''}{node.name}"
        inner += "()" if isinstance(node, ast.FunctionDef) else ""
    if isinstance(node, ast.stmt):
        lines = _lines(node)
    yield _Node(node, inner.removesuffix("()") if inner.endswith("()") else "", *lines)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, function if name == "args" else inner, lines)


_FLIPPED: dict[type, tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE), ast.LtE: (ast.Gt, ast.Lt), ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip


_RETURN_STATE = ast.Return(ast.Name("state", ast.Load()))


def _variants(node: ast.AST) -> Iterator[tuple[ast.AST, str, Change]]:
    """Yield (place, text, change) for one node; a change works on the same node of a copy."""
    before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt | ast.keyword) else ""
    match node:
        case ast.Compare(ops=ops):
            for place, operator in enumerate(ops):
                for other in _FLIPPED.get(type(operator), ()):
                    yield node, f"{before}: {other.__name__}", _set_item("ops", place, other())
        case ast.BoolOp(op=operator, values=values):
            other_op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, f"{before}: {type(other_op).__name__}", _set("op", other_op)
            for place, value in enumerate(values):
                yield node, f"{before}: without {ast.unparse(value)}", _without("values", place)
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"{before}: without not", _replace_unary
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.BitOr() as operator):
            swapped = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd}[type(operator)]
            yield node, f"{before}: {swapped.__name__}", _set("op", swapped())
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare):
                for always in (True, False):
                    yield node, f"if {ast.unparse(test)}: always {always}", _set("test", ast.Constant(always))
            elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Continue | ast.Raise):
                # A comparison that is turned round stops what is usual, and every test sees that; a guard must be left out.
                yield node, f"if {ast.unparse(test)}: never", _set("test", ast.Constant(False))
        case ast.Constant(value=bool() as value):
            yield node, f"{value}: {not value}", _set("value", not value)
        case ast.Constant(value=int() | float() as value):
            yield node, f"{value}: {value + 1}", _set("value", value + 1)
        case ast.Name(id="min" | "max" as name):
            yield node, f"{name}: {'max' if name == 'min' else 'min'}", _set("id", "max" if name == "min" else "min")
        case ast.Name(id="any" | "all" as name):
            yield node, f"{name}: {'all' if name == 'any' else 'any'}", _set("id", "all" if name == "any" else "any")
        case ast.Call(func=ast.Name(id="min" | "max"), args=values) if len(values) > 1:
            for place, value in enumerate(values):
                yield node, f"{before}: without {ast.unparse(value)}", _without("args", place)
        case ast.Call(func=ast.Name(id=name), keywords=keywords) if len(keywords) and _makes(name):
            for place, keyword in enumerate(keywords):
                yield node, f"{before}: forgets {keyword.arg}", _without("keywords", place)
        case ast.comprehension(ifs=filters):
            for place, test in enumerate(filters):
                yield (
                    test,
                    f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}: without if {ast.unparse(test)}",
                    _without("ifs", place),
                )
        case ast.FunctionDef(args=arguments, body=body):
            yield from _statements("body", body, {argument.arg for argument in arguments.args})
        case ast.stmt() | ast.match_case() if isinstance(getattr(node, "body", None), list):
            for field in ("body", "orelse"):
                yield from _statements(field, getattr(node, field, []), set())


def _makes(name: str) -> bool:
    """True for what makes a state, a message or an effect of named parts."""
    return name == "replace" or name[0].isupper()


def _statements(field: str, body: list[ast.stmt], arguments: set[str]) -> Iterator[tuple[ast.AST, str, Change]]:
    """Yield the removal of every statement that only acts: an effect, or a state that is carried on."""
    for place, statement in enumerate(body):
        match statement:
            case ast.Expr(value=ast.Call() as call) if "Journal" not in ast.unparse(call.func):
                if not (call.args and ast.unparse(call.args[0]).startswith(("Journal", "Log"))):
                    yield statement, f"without {ast.unparse(statement)}", _set_item(field, place, ast.Pass())
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call)
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp() as call)
            ) if name in ("state", "members", "dump", "fault", "pace") and name in ast.unparse(call):
                yield statement, f"without {ast.unparse(statement)}", _set_item(field, place, ast.Pass())
            case ast.Assign(targets=[ast.Attribute()]):
                yield statement, f"without {ast.unparse(statement)}", _set_item(field, place, ast.Pass())
            case ast.AugAssign():
                yield statement, f"without {ast.unparse(statement)}", _set_item(field, place, ast.Pass())
            case ast.Return(value=ast.Call()) if "state" in arguments:
                yield (
                    statement,
                    f"instead of {ast.unparse(statement)}: return state",
                    _set_item(field, place, _RETURN_STATE),
                )


def _set(field: str, value: object) -> Change:
    return lambda node: setattr(node, field, value)


def _set_item(field: str, place: int, value: object) -> Change:
    return lambda node: getattr(node, field).__setitem__(place, value)


def _without(field: str, place: int) -> Change:
    def change(node: ast.AST) -> None:
        values = getattr(node, field)
        del values[place]
        if isinstance(node, ast.BoolOp) and len(values) == 1:
            values.append(ast.Constant(isinstance(node.op, ast.And)))
        if isinstance(node, ast.Call) and node.args is values and len(values) == 1:  # of one value, the smallest
            node.args = [ast.Tuple([values[0]], ast.Load())]

    return change


def _replace_unary(node: Any) -> None:
    """`not x` becomes `not not x`."""
    node.operand = ast.UnaryOp(ast.Not(), node.operand)
