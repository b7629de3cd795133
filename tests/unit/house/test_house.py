"""The house rules: who may import whom, what is pure, what is public, and that the package list equals the tree."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

from tests.rooms import FOLDERS, ROOT, imported, product, python_files, under_link

PURE_ROOTS = [
    "ttp.controller.core.machine",
    "ttp.processor.core.machine",
    "ttp.processor.core.causes",
    "ttp.proto.messages",
    "ttp.identity.sealed",
    "ttp.optim.shard_layout.layout",
    "ttp.optim.comparison",
]
"""These and whatever they import are pure."""

PURE_MAY_IMPORT = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "hmac", "itertools", "json", "math",
    "operator", "re", "types", "typing",
}  # fmt: skip

CHECKS_OF_INPUT = ("ttp.inputs.checked", "ttp.inputs.input_file", "ttp.inputs.options")
"""They import nothing of the rest."""

MAY_IMPORT = {
    "ttp.proto": ("ttp.proto", "ttp.errors", "ttp.identity"),
    "ttp.controller": (
        "ttp.proto",
        "ttp.errors",
        "ttp.hang_limits",
        "ttp.heartbeats",
        "ttp.config",
        "ttp.text.streams",
        "ttp.identity",
        "ttp.files",
        "ttp.text.wording",
        *CHECKS_OF_INPUT,
        "ttp.fork_server",
        "ttp.controller",
    ),
    "ttp.processor": ("ttp.proto", "ttp.errors", "ttp.files", "ttp.processor"),
    "ttp.trainer": ("ttp",),
}


@pytest.mark.parametrize("root", PURE_ROOTS)
def test_pure_module_reaches_data_modules_only(root: str) -> None:
    """No clock, randomness, threads, logging, files, torch or grpc in the cores, nor in anything that they import."""
    todo, seen = [root], {root}
    while todo:
        module = todo.pop()
        for name in sorted(imported(product()[module])):
            if not name.startswith("ttp."):
                assert name.split(".")[0] in PURE_MAY_IMPORT, f"{module}, which {root} needs, imports {name}"
            elif name not in seen:
                seen.add(name)
                todo.append(name)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_down(package: str) -> None:
    """trainer -> ttp -> controller, processor -> proto; controller and processor meet only through proto."""
    folder = package.removeprefix("ttp.")
    for path in python_files(folder):
        for name in sorted(imported(path)):
            if name == "ttp" or name.startswith("ttp."):
                allowed = MAY_IMPORT[package]
                assert any(name == a or name.startswith(a + ".") for a in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_ttp_does_not_import_the_trainer() -> None:
    """The bundled trainer is a user like any other. What stands above it asks it: the self-test runs it, the doctor has it plan."""
    for path in python_files("ttp"):
        above = {"selftest", "doctor"}.intersection(path.parts)
        assert above or not any(n.startswith("ttp.trainer") for n in imported(path)), path


def test_only_config_reads_ttp_variables_from_the_environment() -> None:
    """One reader of TTP's settings (the launcher and the harness hand an environment on, and name it)."""
    allowed = {
        "ttp/config.py",
        "ttp/doctor/this_machine.py",  # hands its environment on to a fork server, as ttprun does
        "controller/process.py",  # hands its environment on to the controller
        "proto/transport.py",  # gRPC takes its settings from there
        "ttp/fork_server/forked_program.py",  # gives a forked process the variables that an executed one would have
    }
    for folder in FOLDERS:
        for path in python_files(folder):
            relative = str(path.relative_to(ROOT))
            if relative in allowed or relative.startswith(
                ("ttp/launch/", "ttp/chaos/observed/", "ttp/chaos/nodes/namespaces.py", "trainer/")
            ):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("environ", "getenv")
                    and ast.unparse(node.value) == "os"
                ):
                    raise AssertionError(f"{relative}:{node.lineno} reads the environment")


def test_package_list_equals_the_tree() -> None:
    """Every folder with Python in it is shipped."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            if not under_link(init):
                parts = init.parent.relative_to(ROOT / folder).parts
                found.add(".".join([package, *parts]))
    assert listed == found


@pytest.mark.parametrize("folder", ["controller", "processor", "trainer", "proto"])
def test_mapped_folder_cannot_be_imported_twice(folder: str) -> None:
    """`import controller` from the root would make a second copy whose enums compare unequal."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and f"ttp.{folder}" in done.stderr


def test_controller_loads_without_torch() -> None:
    """The controller's process starts fast and small."""
    code = "import sys, ttp.controller.__main__, ttp.controller.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", timeout=60, check=False).returncode == 0


def test_public_names_are_frozen() -> None:
    """What users import changes only on purpose."""
    import ttp

    assert ttp.__all__ == [
        "Checkpoint",
        "ClipNorm",
        "ClipValue",
        "CopyOptions",
        "Guard",
        "LossScale",
        "ResumePoint",
        "Session",
        "Settings",
        "StepResult",
        "TTPOddReplicaOptimizer",
        "TTPReplicaOptimizer",
        "current_session",
        "errors",
        "init_process_group",
        "open_checkpoint",
        "protect",
        "replicas_apart",
        "start",
        "ttp_to_persist",
    ]
    for name in ttp.__all__:
        assert getattr(ttp, name) is not None


def test_no_file_past_500_lines() -> None:
    """One idea a file."""
    for folder in (*FOLDERS, "tests", "benchmarks"):
        for path in python_files(folder):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines"
