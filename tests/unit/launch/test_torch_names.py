"""What ttprun takes from torch: public names, and the few private ones that are listed."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.unit.launch.test_agent import make_agent
from ttp.launch.torch_names import ARGPARSE_NAMES, PRIVATE_NAMES, PYTHON_RUN_WITH, RUN_WITH

LAUNCH = Path(__file__).resolve().parents[3] / "ttp" / "launch"
NAMES = {private.name for private in PRIVATE_NAMES if private.kind != "variable"}
VARIABLES = {private.name for private in PRIVATE_NAMES if private.kind == "variable"}


def torchs_own() -> set[str]:
    """Return the private names that torch's agent has, of its class and of an instance."""
    agent = make_agent()
    instance = {name for name in vars(agent) if name not in vars_of_ours()}
    return {name for name in {*dir(LocalElasticAgent), *instance} if re.match(r"_[^_]", name)}


def vars_of_ours() -> set[str]:
    """Return the attributes that HoldAgent's own constructor sets."""
    tree = ast.parse((LAUNCH / "agent.py").read_text())
    init = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    targets = [t for n in ast.walk(init) if isinstance(n, ast.Assign | ast.AnnAssign) for t in assigned(n)]
    return {t.attr for t in targets if isinstance(t, ast.Attribute)}


def assigned(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: str(private.name))
def test_every_listed_name_is_there_in_this_torch(private: object) -> None:
    """As a method that torch declares for its subclasses, as an attribute of an agent, or as a variable that its rendezvous reads."""
    name, kind = getattr(private, "name"), getattr(private, "kind")  # noqa: B009
    if kind == "variable":
        readers = (Path(torch.__file__).parent / "distributed" / "elastic" / "rendezvous").glob("*.py")
        assert any(f'"{name}"' in path.read_text() for path in readers)
    elif kind == "method":
        assert callable(getattr(SimpleElasticAgent, name))
    else:
        assert kind == "attribute" and isinstance(getattr(make_agent(), name), int)


def test_the_list_is_all_that_ttprun_uses() -> None:
    """Every private name of torch's agent in ttprun's code, and no other, is listed."""
    used = {
        node.attr
        for path in LAUNCH.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    defined = {
        node.name
        for node in ast.walk(ast.parse((LAUNCH / "agent.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert (used | defined) & torchs_own() == NAMES


def test_the_list_has_every_variable_of_torchs_rendezvous_that_ttprun_sets() -> None:
    """torch's own, not those of its launcher (`TORCHELASTIC_...`, `TORCH_ELASTIC_...`), which its documentation names."""
    used = {
        node.value
        for path in LAUNCH.rglob("*.py")
        if path.name != "torch_names.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"TORCH_(?!ELASTIC_)\w+", node.value)
    }
    assert used == VARIABLES


def test_nothing_private_is_imported_from_torch() -> None:
    """No module and no name with a leading underscore."""
    for path in LAUNCH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(word.startswith("_") for word in words), f"{path.name}:{node.lineno}"


def test_own_names_hide_none_of_torchs() -> None:
    """An attribute that torch's agent also has would break it silently."""
    plain = {name for name in vars(make_agent()) if name not in vars_of_ours()}
    assert not (vars_of_ours() - NAMES) & (plain | set(dir(LocalElasticAgent)))


def test_this_torch_is_one_that_is_listed() -> None:
    """A new version is listed once these tests, and those of real launches, have passed with it."""
    assert torch.__version__.partition("+")[0] in RUN_WITH


def test_the_list_of_argparses_private_names_is_all_that_ttprun_uses() -> None:
    """As methods that are overridden, or as attributes; of the parser and of a group of its options."""
    parser = argparse.ArgumentParser()
    theirs = {
        name for owner in (parser, parser.add_argument_group("g")) for name in dir(owner) if name[0] == "_" != name[1]
    }
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for path in LAUNCH.rglob("*.py")
        if "argparse" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.FunctionDef)
    }
    assert used & theirs == {private.name for private in ARGPARSE_NAMES}


def test_this_python_is_one_that_is_listed() -> None:
    """A new one is listed once the command line's tests have passed with it."""
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHON_RUN_WITH
