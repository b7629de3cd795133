"""ttprun beside torchrun, both really run: the same command line gives the same job, but for what is listed here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.launching import TORCHRUN, TTPRUN, WARM, Launch
from tests.ports import free_port
from ttp.nccl import NCCL_SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

OWN_VARIABLES = {
    "TTP_LAUNCHED": "the rank's parent is the launcher: when it is gone, the rank leaves",
    "TTP_ATTEMPT": "the attempt's number, the same on all nodes (TORCHELASTIC_RESTART_COUNT is each node's own count)",
    "TTP_ROUND_ID": "the earlier name of TTP_ATTEMPT",
    "TTP_START_ID": "by which the launcher knows this attempt's controllers among all processes",
    "TTP_ATTEMPT_DIR": "where the first rank of the node writes for its agent which controllers lead the ranks",
    "TTP_IDENTITY": "where processes get their certificates",
    "TTP_COPIES": "where ranks get memory for copies",
    "TTP_RELAY_SOCKET": "where ranks find their relay: empty but in a large job",
    "TTP_VACANT": "whose place a process takes: empty but in a lost one's",
    "TTP_FORK_SERVER": "where ranks have their controllers forked",
    "GRPC_ENABLE_FORK_SUPPORT": "0, else data loaders that fork crash or crawl once gRPC is loaded",
}
"""What workers find in their environment beyond torchrun's, and why."""

OF_EACH_RUN = {
    "MASTER_PORT": "a free port each time; ttprun's is the attempt's own store",
    "MASTER_ADDR": "one node: torchrun gives the host's name, ttprun 127.0.0.1, where its store listens",
    "TORCHELASTIC_RUN_ID": "random, when --rdzv-id is not given",
    "TORCHELASTIC_ERROR_FILE": "in the run's own folder",
}
"""What may differ in value."""

WORKER = """
keys = sorted(set(os.environ) - set(json.loads(os.environ["BEFORE"])))
note("environ", json.dumps({key: os.environ[key] for key in keys}))
note("argv", json.dumps(sys.argv[1:]))
os.write(1, f"to stdout {rank}\\n".encode())  # whole: print's pieces may have another rank's between them
os.write(2, f"to stderr {rank}\\n".encode())
note("done")
if sys.argv[2] == "fail" and rank == 1:
    for peer in range(int(os.environ["WORLD_SIZE"])):
        if peer != rank:
            await_file(f"done-{peer}-{start}")  # torchrun ends it from here on
    sys.exit(4)
"""

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    note("environ", json.dumps({"RANK": str(rank)}))
    if rank == 1:
        raise ValueError("boom")
main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command line; `{out}` stands for the run's folder, `{port}` for a free port."""

    options: Sequence[str]
    worker: str = WORKER
    end: str = "succeed"
    environ: dict[str, str] = field(default_factory=dict)
    as_module: bool = False
    without_python: bool = False
    own_variables: bool = True


LOGGED = ("--log-dir", "{out}/logs")
C10D = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--max-restarts", "0")
CASES = {
    "-m, --standalone, --role, --tee, --local-ranks-filter": Case(
        options=(
            *("--standalone", "--nproc-per-node", "2", "--role", "trainer", "--tee", "3", *LOGGED),
            *("--local-ranks-filter", "1", "--max-restarts", "0"),
        ),
        as_module=True,
    ),
    "--no-python, --nproc-per-node cpu, a failure": Case(
        options=("--nproc_per_node", "cpu", *LOGGED, "--redirects", "0:1,1:2", "--max-restarts", "0"),
        without_python=True,
        end="fail",
    ),
    "--nproc-per-node auto, @record": Case(
        options=("--nproc-per-node=auto", *LOGGED, "-r", "3", "-t", "1:2", "--max_restarts=0"), worker=RECORDED
    ),
    "--rdzv-backend c10d in a file": Case(
        options=(*C10D, "--rdzv-endpoint", "{out}/store", "--rdzv-conf", "store_type=file", *LOGGED),
    ),
    "ENABLE_TTP=False, --rdzv-backend c10d in a file": Case(
        options=(*C10D, "--rdzv-endpoint", "{out}/store", "--rdzv-conf", "store_type=file", *LOGGED),
        environ={"ENABLE_TTP": "False"},
        own_variables=False,
    ),
    "--rdzv-backend c10d at a port": Case(options=(*C10D, "--rdzv-endpoint", "localhost:{port}", *LOGGED)),
    "ENABLE_TTP=False, with a restart": Case(
        options=("--nproc-per-node", "2", *LOGGED, "-t", "3", "--max-restarts", "1"),
        end="fail",
        environ={"ENABLE_TTP": "False"},
        own_variables=False,
    ),
}


LONG = tuple(name for name in CASES if "c10d" in name or "@record" in name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES])
def test_the_same_command_line_gives_the_same_job(tmp_path: Path, name: str) -> None:
    """Exit code, error files, log layout and contents, what the console shows of the workers, arguments and environment."""
    case = CASES[name]
    ours, theirs = (observe(tmp_path / kind, case, program) for kind, program in (("o", TTPRUN), ("t", TORCHRUN)))
    for rank, environ in ours["environ"].items():
        own = {key for key in environ if key in OWN_VARIABLES}
        assert own == (set(OWN_VARIABLES) if case.own_variables and case.worker is WORKER else set()), rank
        if own:
            assert all(environ[key] == value for key, (value, _) in NCCL_SETTINGS.items()), rank
        ours["environ"][rank] = _comparable(environ)
    theirs["environ"] = {rank: _comparable(environ) for rank, environ in theirs["environ"].items()}
    assert ours == theirs
    assert ours["environ"]
    failed = case.end == "fail" or case.worker is RECORDED
    assert ours["status"] == (1 if failed else 0) and bool(ours["root"]) == failed


def _comparable(environ: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in {*OWN_VARIABLES, *NCCL_SETTINGS}}


@pytest.mark.parametrize("redirects", ["0", pytest.param("2", marks=pytest.mark.long)])
def test_an_exception_without_record_is_named_all_the_same(tmp_path: Path, redirects: str) -> None:
    """torchrun knows the exit code only; under ttprun a script that is protected leaves its traceback in the error file. It is shown
    once: by the rank itself, or by the launcher where the rank's stderr is in a file."""
    worker = (
        "import ttp\n@ttp.ttp_to_persist\ndef train(): pass\n"
        "def build():\n    if rank == 1: raise ValueError('no such data set')\nbuild()\n"
    )
    error = tmp_path / "error.json"
    options = (
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
        "--log-dir",
        str(tmp_path / "logs"),
        "--redirects",
        redirects,
    )
    with Launch(tmp_path, worker, *options, environ={"TORCHELASTIC_ERROR_FILE": str(error)}) as job:
        assert job.wait() == 1
    message = json.loads(error.read_text())["message"]
    assert message["message"] == "ValueError: no such data set" and message["errorCode"] == 1
    assert "in build" in message["extraInfo"]["py_callstack"]
    assert "rank 1: exit code 1" in job.text and "rank 1 raised ValueError: no such data set" in job.text
    quoted = re.search(r"rank 1's traceback:\n +Traceback .*\n( +.*\n)+ +ValueError: no such data set", job.text)
    assert (quoted is not None) == (redirects == "2") and job.text.count("Traceback (most recent call last)") == 1
    assert "traceback : ValueError: no such data set (in the error file)" in job.text


def observe(out: Path, case: Case, program: Sequence[str]) -> dict[str, Any]:
    """Run the case under one launcher and return all that is compared."""
    out.mkdir()
    before = [
        *(set(os.environ) - {*OWN_VARIABLES, *NCCL_SETTINGS}),
        *WARM,
        "BEFORE",
        "LAUNCH_TEST_MARK",
        "LC_CTYPE",
        "ENABLE_TTP",
    ]
    environ = {
        **WARM,
        **case.environ,
        "BEFORE": json.dumps(before),
        "TORCHELASTIC_ERROR_FILE": str(out / "error.json"),
        "PYTHONPATH": f"{out}:{os.environ.get('PYTHONPATH', '')}",
    }
    options = [option.format(out=out, port=free_port()) for option in case.options]
    form = "module" if case.as_module else "program" if case.without_python else "script"
    with Launch(
        out, case.worker, *options, program=program, environ=environ, arguments=[case.end, "--lr", "1"], form=form
    ) as job:
        status = job.wait()
        job.assert_nothing_left()
    error = out / "error.json"
    logs = sorted((out / "logs").rglob("*.log"))
    return {
        "status": status,
        "error": json.loads(error.read_text())["message"]["message"] if error.exists() else None,
        "code": json.loads(error.read_text())["message"].get("errorCode") if error.exists() else None,
        "logs": {
            re.sub(r"^[^/]*/", "", str(path.relative_to(out / "logs"))): path.read_text().replace(str(out), "OUT")
            for path in logs
        },
        "error files": sorted(str(p.parent.relative_to(p.parents[2])) for p in (out / "logs").rglob("error.json")),
        "console": sorted(line for line in job.text.splitlines() if re.match(r"(\[\w+\d\]:)?to std", line)),
        "root": re.findall(r"Root Cause.*?rank +: (\d).*?exitcode +: (-?\d+)", job.text, re.S),
        "argv": {note: job.read(note).replace(str(out), "OUT") for note in job.notes("argv")},
        "environ": {
            note: {
                key: "set" if key in OF_EACH_RUN else value.replace(str(out), "OUT")
                for key, value in json.loads(job.read(note)).items()
            }
            for note in job.notes("environ")
        },
    }
