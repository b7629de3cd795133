"""Break the shipped cores in every small way, one at a time, and name what nobody notices: `make mutants`.

Each mutant is one changed comparison, condition, constant, field or statement of a pure module of the controller or the
processor. It runs in a process of its own, where the changed module is imported instead of the shipped one: first simulated
jobs, then the protocol's unit tests and the scripts. What survives both is printed with its place: either it changes nothing that matters,
or a test is missing. Owns the making of mutants and their trial; what is wrong is for the invariants and tests to say.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    *(f"controller.{name}" for name in (
        "decision", "rounds", "settling", "machine", "rolling", "writing", "publishing", "planning", "membership", "presence",
        "takeover", "leaving", "patience", "hangs", "progress", "transitions", "rank_table",
    )),
    *(f"processor.{name}" for name in ("orders", "transitions", "machine", "succession")),
)  # fmt: skip
UNIT_TESTS = tuple(
    f"tests/{name}"
    for name in (
        "unit/protocol",
        "simulation/test_scenarios.py",
        "simulation/test_hangs.py",
        "simulation/test_failover.py",
    )
)
LONGEST_TRIAL_S = 60
"""Of one mutant, of processor time."""
Change = Callable[[Any], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one module: the `index`-th of those that `changes` yields."""

    module: str
    index: int
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.index}"


def changes(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], ast.Module]]]:
    """Yield (line, what is changed, how to get the changed module) for every small change that a module allows."""
    for position, node in enumerate(_nodes(tree)):
        for text, change in _variants(node):
            yield getattr(node, "lineno", 0), text, partial(_changed, tree, position, change)


def _changed(tree: ast.Module, position: int, change: Change) -> ast.Module:
    changed = copy.deepcopy(tree)
    change(_nodes(changed)[position])
    return ast.fix_missing_locations(changed)


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes that may be changed, always in the same order: annotations and texts are left alone."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Journal":
            return
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(tree)
    return found


_FLIPPED: dict[type, tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE), ast.LtE: (ast.Gt, ast.Lt), ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip


def _variants(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield (text, change) for one node; a change works on the same node of a copy."""
    before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt | ast.keyword) else ""
    match node:
        case ast.Compare(ops=ops):
            for place, operator in enumerate(ops):
                for other in _FLIPPED.get(type(operator), ()):
                    yield f"{before}: {other.__name__}", _set_item("ops", place, other())
        case ast.BoolOp(op=operator, values=values):
            other_op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"{before}: {type(other_op).__name__}", _set("op", other_op)
            for place, value in enumerate(values):
                yield f"{before}: without {ast.unparse(value)}", _without("values", place)
        case ast.UnaryOp(op=ast.Not()):
            yield f"{before}: without not", _replace_unary
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.BitOr() as operator):
            swapped = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd}[type(operator)]
            yield f"{before}: {swapped.__name__}", _set("op", swapped())
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare):
                for always in (True, False):
                    yield f"if {ast.unparse(test)}: always {always}", _set("test", ast.Constant(always))
        case ast.Constant(value=bool() as value):
            yield f"{value}: {not value}", _set("value", not value)
        case ast.Constant(value=int() | float() as value):
            yield f"{value}: {value + 1}", _set("value", value + 1)
        case ast.Name(id="min" | "max" as name):
            yield f"{name}: {'max' if name == 'min' else 'min'}", _set("id", "max" if name == "min" else "min")
        case ast.Call(func=ast.Name(id="replace"), keywords=keywords) if len(keywords):
            for place, keyword in enumerate(keywords):
                yield f"{before}: forgets {keyword.arg}", _without("keywords", place)
        case ast.FunctionDef(args=arguments, body=body):
            yield from _statements(body, {argument.arg for argument in arguments.args})
        case ast.stmt() if hasattr(node, "body") and isinstance(node.body, list):
            yield from _statements(node.body, set())


def _statements(body: list[ast.stmt], arguments: set[str]) -> Iterator[tuple[str, Change]]:
    """Yield the removal of every statement that only acts: an effect, or a state that is carried on."""
    for place, statement in enumerate(body):
        match statement:
            case ast.Expr(value=ast.Call() as call) if "Journal" not in ast.unparse(call.func):
                if not (call.args and ast.unparse(call.args[0]).startswith(("Journal", "Log"))):
                    yield f"without {ast.unparse(statement)}", _drop(place)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call)
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp() as call)
            ) if name in ("state", "members", "dump", "fault", "pace") and name in ast.unparse(call):
                yield f"without {ast.unparse(statement)}", _drop(place)
            case ast.AugAssign():
                yield f"without {ast.unparse(statement)}", _drop(place)
            case ast.Return(value=ast.Call()) if "state" in arguments:
                yield f"instead of {ast.unparse(statement)}: return state", _return_state(place)


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

    return change


def _replace_unary(node: Any) -> None:
    """`not x` becomes `not not x`."""
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _drop(place: int) -> Change:
    return lambda node: node.body.__setitem__(place, ast.Pass())


def _return_state(place: int) -> Change:
    return lambda node: node.body.__setitem__(place, ast.Return(ast.Name("state", ast.Load())))


def mutants_of(module: str) -> list[Mutant]:
    return [Mutant(module, index, line, text) for index, (line, text, _) in enumerate(changes(_tree(module)))]


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


# --- the trial, in a process of its own ---


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module's changed code to whoever imports it."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = f"ttp.{mutant.module}"
        self._path = str(ROOT / f"{mutant.module.replace('.', '/')}.py")
        _, _, made = next(itertools.islice(changes(_tree(mutant.module)), mutant.index, None))
        self._code = compile(made(), self._path, "exec")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, origin=self._path) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


def tried(mutant: Mutant, seeds: int, unit_tests: bool) -> str:
    """Return by what a mutant was caught, in a word or two; empty when it survived."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_TRIAL_S, LONGEST_TRIAL_S))  # a mutant may never end
        try:
            verdict = _verdict(mutant, seeds, unit_tests)
        except BaseException as error:  # whatever it is, it was noticed
            verdict = f"raised {type(error).__name__}"
        os.write(write_end, verdict.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        verdict = answer.read()
    _, status = os.waitpid(pid, 0)
    return verdict if status == 0 else "did not end"


def _verdict(mutant: Mutant, seeds: int, unit_tests: bool) -> str:
    sys.meta_path.insert(0, _Instead(mutant))
    sys.modules.pop(f"ttp.{mutant.module}", None)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from tests.simulation.checks import run_and_check
        from tests.simulation.scenario import build

        for seed in range(seeds):
            if found := run_and_check(build(seed)):
                return f"seed {seed}: {found[0][:3]}"
        if unit_tests:
            import pytest

            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(str(ROOT / name) for name in UNIT_TESTS)])
            return "unit tests" if status else ""
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "mutants", nargs="*", help="modules (controller.rounds) or mutants (controller.rounds:12); default: all"
    )
    parser.add_argument("--seeds", type=int, default=300, help="simulated jobs of each mutant")
    parser.add_argument("--sample", type=int, default=0, help="only so many, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-unit-tests", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    arguments = parser.parse_args()
    wanted = arguments.mutants or MODULES
    chosen = [
        mutant
        for module in dict.fromkeys(name.split(":")[0] for name in wanted)
        for mutant in mutants_of(module)
        if module in wanted or mutant.name in wanted
    ]
    if arguments.sample:
        chosen = random.Random(arguments.seed).sample(chosen, min(arguments.sample, len(chosen)))
    began, verdicts = time.monotonic(), Counter[str]()
    for mutant in chosen:
        if arguments.list:
            print(f"{mutant.name} line {mutant.line}: {mutant.text}")
            continue
        verdict = tried(mutant, arguments.seeds, not arguments.no_unit_tests)
        verdicts[verdict.split(":")[0].split(" ")[0] or "survived"] += 1
        if not verdict or len(chosen) < 20:
            print(f"{verdict or 'SURVIVED'}: {mutant.name} line {mutant.line}: {mutant.text}", flush=True)
    print(f"{len(chosen)} mutants in {time.monotonic() - began:.0f} s: {dict(verdicts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
