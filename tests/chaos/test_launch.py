"""ttprun with real processes: holding, restarting, ending; and torchrun beside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.launching import TORCHRUN, TTPRUN, WARM, Launch
from tests.ports import free_port
from ttp.launch.attempts.signals import SAME_S
from ttp.nccl import NCCL_SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

HELD = """
signal.signal(signal.SIGTERM, lambda *_: (note("sigterm"), sys.exit(1)))
note("begun", os.getpid())
if start == "0":
    for peer in range(3):
        await_file(f"begun-{peer}-0")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    victim = int((out / "begun-1-0").read_text())
    while running(victim):
        time.sleep(0.01)
    while "; holding ranks 0, 2 for up to " not in (out / "launcher.log").read_text():
        time.sleep(0.01)
    time.sleep(0.5 * (rank + 1))  # the time that a checkpoint takes
    note("persisted")
    os._exit(75)  # at once: what torch does at an exit takes long on a busy machine
"""


def test_survivors_of_a_kill_are_held_until_they_have_persisted_and_all_restart(tmp_path: Path) -> None:
    """No rank is sent SIGTERM; the second attempt has every rank; one line reports each transition."""
    with Launch(tmp_path, HELD, "--nproc-per-node", "3", environ=WARM) as job:
        assert job.wait() == 0, job.text
        assert job.notes("persisted") == ["persisted-0-0", "persisted-2-0"]
        assert job.notes("sigterm") == []
        assert [name for name in job.notes("begun") if name.endswith("-1")] == ["begun-0-1", "begun-1-1", "begun-2-1"]
        pid = job.read("begun-1-0")
        line = rf"rank 1 \(pid {pid}\) ended: signal SIGKILL; holding ranks 0, 2 for up to (3|10) s"
        assert re.search(line, job.text), job.text  # 10: the workers' store has not answered the agent yet
        held = re.search(r"all workers on this node exited (\d+\.\d+) s after the fault", job.text)
        assert held is not None and 1.5 <= float(held[1]) < 20
        assert (
            "restarting (1 of 3 restarts): rank 1: signal SIGKILL; ranks 0, 2: exited for the restart (exit code 75)"
            in job.text
        )
        assert f"failed (exitcode: -9) local_rank: 1 (pid: {pid})" in job.text, "torch's own line names another rank"
        assert "failed (exitcode: 75)" not in job.text
        job.assert_nothing_left()


STUCK = """
import subprocess
signal.signal(signal.SIGTERM, lambda *_: note("sigterm", time.monotonic()))  # and go on
if rank == 0:
    await_file("begun-1-0")
    note("died", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen(["sleep", "600"])
note("begun")
while True:
    time.sleep(0.05)
"""


@pytest.mark.long
def test_a_stuck_survivor_is_ended_when_the_time_of_the_fault_is_over(tmp_path: Path) -> None:
    """First SIGTERM, not before TTP_OT; then SIGKILL, its children too; the killed rank stays the root cause."""
    with Launch(tmp_path, STUCK, "--nproc-per-node", "2", "--max-restarts", "0", environ={"TTP_OT": "2"}) as job:
        assert job.wait() == 1
        assert float(job.read("sigterm-1-0")) - float(job.read("died-0-0")) >= 2.0
        assert "TTP_OT (2 s) expired; terminating rank 1 (fault: rank 0 (pid" in job.text
        assert "killed rank 1: no exit within 5 s" in job.text
        assert "no restart left (of 0): rank 0: signal SIGKILL; rank 1: ended by ttprun (signal SIGKILL)" in job.text
        assert re.search(r"Root Cause.*?rank +: 0 \(local_rank: 0\)\n +exitcode +: -9 ", job.text, re.S)
        job.assert_nothing_left()


def test_restarts_end_with_max_restarts(tmp_path: Path) -> None:
    """As torchrun counts them: one attempt and so many restarts."""
    with Launch(tmp_path, "note('begun'); sys.exit(3)", "--max-restarts", "2") as job:
        assert job.wait() == 1
        assert job.notes("begun") == ["begun-0-0", "begun-0-1", "begun-0-2"]
        assert "restarting (2 of 2 restarts): rank 0: exit code 3" in job.text
        assert "no restart left (of 2)" in job.text


REPORTING = """
keys = sorted(set(os.environ) - set(json.loads(os.environ["BEFORE"])))
note("environ", json.dumps({key: os.environ[key] for key in keys}))
print("to stdout", rank, flush=True)
print("to stderr", rank, file=sys.stderr, flush=True)
note("done")
if sys.argv[2] == "fail" and rank == 1:
    await_file(f"done-0-{start}")  # torchrun ends rank 0 from here on
    extra = {"py_callstack": "Traceback: boom", "timestamp": str(int(time.time()))}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(
        json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    sys.exit(4)
"""
OWN_VARIABLES = {
    "TTP_IDENTITY", "TTP_COPIES", "TTP_RELAY_SOCKET", "TTP_VACANT", "TTP_LAUNCHED", "TTP_ATTEMPT", "TTP_ROUND_ID", "TTP_START_ID", "TTP_ATTEMPT_DIR", "TTP_FORK_SERVER",
    "GRPC_ENABLE_FORK_SUPPORT",
}  # fmt: skip
MAY_DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


@pytest.mark.parametrize("how", [pytest.param("succeed", marks=pytest.mark.long), "fail"])
def test_a_job_looks_the_same_under_ttprun_and_torchrun(tmp_path: Path, how: str) -> None:
    """Exit code, error file, log layout and contents, and the workers' environment."""
    seen = {}
    for name, program in (("ttprun", TTPRUN), ("torchrun", TORCHRUN)):
        out = tmp_path / name
        out.mkdir()
        inherited = set(os.environ) - OWN_VARIABLES - NCCL_SETTINGS.keys()
        before = [*inherited, *WARM, "BEFORE", "LAUNCH_TEST_MARK", "LC_CTYPE"]
        environ = {**WARM, "TORCHELASTIC_ERROR_FILE": str(out / "error.json"), "BEFORE": json.dumps(before)}
        options = ("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", str(out / "logs"), "--redirects", "3")
        with Launch(out, REPORTING, *options, program=program, environ=environ, arguments=[how]) as job:
            status = job.wait()
            variables = {rank: json.loads(job.read(f"environ-{rank}-0")) for rank in (0, 1)}
        error = out / "error.json"
        logs = sorted((out / "logs").rglob("*.log"))
        seen[name] = {
            "status": status,
            "error": json.loads(error.read_text())["message"]["message"] if error.exists() else None,
            "logs": {re.sub(r"^[^/]*/", "", str(p.relative_to(out / "logs"))): p.read_text() for p in logs},
            "error files": sorted(p.parent.name for p in (out / "logs").rglob("error.json")),
            "root": re.findall(r"Root Cause.*?rank +: (\d)", job.text, re.S),
        }
        if name == "ttprun":
            assert {key for key in variables[1] if key in OWN_VARIABLES} == OWN_VARIABLES
            assert all(variables[1][key] == value for key, (value, _) in NCCL_SETTINGS.items())
        seen[name]["environment"] = {
            rank: {
                key: "set" if key in MAY_DIFFER else value
                for key, value in variables[rank].items()
                if key not in {*OWN_VARIABLES, *NCCL_SETTINGS}
            }
            for rank in variables
        }
    assert seen["ttprun"] == seen["torchrun"]
    assert seen["ttprun"]["status"] == (1 if how == "fail" else 0)
    assert seen["ttprun"]["error"] == ("ValueError: boom" if how == "fail" else None)


GLOO = """
import datetime
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
x = torch.ones(4) * (rank + 1)
dist.all_reduce(x)
note("sum", x[0].item())
if start == "0":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(x)
    except RuntimeError:
        os._exit(75)
dist.destroy_process_group()
"""


def test_a_gloo_job_comes_back(tmp_path: Path) -> None:
    """With torch's own rendezvous the second attempt finds the first one's addresses and fails."""
    with Launch(tmp_path, GLOO, "--nproc-per-node", "2") as job:
        assert job.wait() == 0, job.text
        assert job.notes("sum") == ["sum-0-0", "sum-0-1", "sum-1-0", "sum-1-1"]
        assert {job.read(name) for name in job.notes("sum")} == {"3.0"}
        assert "restarting (1 of 3 restarts)" in job.text


LITTER = """
import subprocess
if rank == 0:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    controller = subprocess.Popen([sys.executable, "-c", code, "ttp.controller"], stdout=-1, start_new_session=True)
    controller.stdout.readline()
subprocess.Popen(["sh", "-c", "trap '' INT TERM; while :; do sleep 1; done"])
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: note("sigterm"))
note("begun")
if "leave" not in sys.argv:
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_nothing_is_left_after_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """Workers, their deaf children, and a controller in a session of its own that was not published."""
    with Launch(tmp_path, LITTER, "--nproc-per-node", "2", environ=WARM) as job:
        job.await_notes("begun-0-0", "begun-1-0")
        job.says("attempt 0: ")
        assert len(job.marked()) >= 5
        job.process.send_signal(number)
        assert job.wait() == 1
        assert job.text.endswith(f"ttprun: the agent received signal {number.value} ({number.name})\n"), job.text
        assert "SignalException" not in job.text, "a signal to the agent is not an error"
        job.assert_nothing_left()


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    """Workers that ignore the first one have 30 s, as under torchrun; a second one kills them."""
    with Launch(tmp_path, LITTER, "--nproc-per-node", "2", arguments=["deaf"], environ=WARM) as job:
        job.await_notes("begun-0-0", "begun-1-0")
        job.says("attempt 0: ")
        job.process.send_signal(signal.SIGTERM)
        job.await_notes("sigterm-0-0", "sigterm-1-0")
        time.sleep(3 * SAME_S)  # one that comes sooner is the same notice
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 1
        assert "second signal received: killing the workers" in job.text
        job.assert_nothing_left()


EARLY = """
def swallow():
    try:
        note("importing")
        while True:
            time.sleep(0.01)
    except BaseException:  # as libraries do around what they may import
        note("swallowed")
swallow()
if "catches" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: None)
    note("handler")
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_workers_that_are_still_starting_are_ended_promptly(tmp_path: Path, number: signal.Signals) -> None:
    """No controller was ever there, so there is nothing to save: also where Ctrl-C is lost in an import, torch's 30 s are not
    waited for."""
    with Launch(tmp_path, EARLY, "--nproc-per-node", "2", environ=WARM) as job:
        job.await_notes("importing-0-0", "importing-1-0")
        job.says("attempt 0: ")
        job.process.send_signal(number)
        assert job.wait() == 1
        assert ("ranks 0-1 did not exit on SIGINT; sending SIGTERM" in job.text) == (number == signal.SIGINT)
        assert "no exit within" not in job.text, "killed after the 30 s"
        job.assert_nothing_left()


@pytest.mark.long
def test_a_worker_that_handles_sigterm_keeps_its_grace_after_ctrl_c(tmp_path: Path) -> None:
    """As under torchrun: it may be saving. Here --shutdown-timeout ends it."""
    options = ("--nproc-per-node", "1", "--shutdown-timeout", "8")
    with Launch(tmp_path, EARLY, *options, arguments=["catches"]) as job:
        job.await_notes("importing-0-0")
        job.says("attempt 0: ")
        began = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        job.await_notes("handler-0-0")
        assert job.wait() == 1 and time.monotonic() - began >= 8.0
        assert "did not exit on SIGINT" not in job.text and "killed rank 0: no exit within" in job.text
        job.assert_nothing_left()


BUSY = """
import os, runpy, signal, sys, threading
import importlib.abc
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
class Swallow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(1)
            except BaseException:
                print("swallowed", flush=True)
        return None
sys.meta_path.insert(0, Swallow())
sys.argv = ["ttprun", "--nproc-per-node", "1", *sys.argv[-2:]]
runpy.run_module("ttp.launch", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_while_the_launcher_itself_is_loading_ends_it(tmp_path: Path) -> None:
    """A library that swallows what is raised in its import does not swallow Ctrl-C."""
    driver = tmp_path / "driver.py"
    driver.write_text(BUSY)
    with Launch(tmp_path, "note('begun')", program=[str(driver)]) as job:
        assert job.wait() == -signal.SIGINT, job.text
        assert "swallowed" not in job.text and job.notes("begun") == []


def test_nothing_is_left_after_success(tmp_path: Path) -> None:
    """Background processes of the workers go with the job."""
    with Launch(tmp_path, LITTER, arguments=["leave"]) as job:
        assert job.wait() == 0, job.text
        job.assert_nothing_left()


PLAIN = """
note("environ", json.dumps(dict(os.environ)))
if rank == 1:
    await_file("begun-0-0")
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (note("sigterm"), sys.exit(0)))
note("begun")
while True:  # a signal that arrives just before one long sleep is handled after it
    time.sleep(0.05)
"""


def test_without_ttp_it_is_torchrun(tmp_path: Path) -> None:
    """ENABLE_TTP=False: peers are ended at once, no restart unless asked for, nothing of ours in the environment."""
    with Launch(tmp_path, PLAIN, "--nproc-per-node", "2", "--ttp-ot", "500", environ={"ENABLE_TTP": "False"}) as job:
        assert job.wait() == 1
        assert job.notes("sigterm") == ["sigterm-0-0"]
        environ = json.loads(job.read("environ-0-0"))
        assert environ["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert not OWN_VARIABLES & set(environ)
        assert "[ttprun" not in job.text


def test_a_bad_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """One line with the variable, its value and what is expected; no traceback."""
    with Launch(tmp_path, "note('begun')", environ={"TTP_OT": "soon"}) as job:
        assert job.wait() == 2
        assert job.text.strip().splitlines()[-1] == "ttprun: error: invalid TTP_OT='soon': expected a number"
        assert job.notes("begun") == []


NODES = """
note("begun", os.getpid())
if start == "0":
    for peer in range(4):
        await_file(f"begun-{peer}-0")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    victim = int((out / "begun-3-0").read_text())
    while running(victim):
        time.sleep(0.01)
    time.sleep(1.5 if rank == 0 else 0)  # one node's survivors are done before the other's
    note("persisted")
    sys.exit(75)
"""


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.long)])
def test_survivors_on_two_nodes_are_held_and_all_restart(tmp_path: Path, backend: str) -> None:
    """Two launchers: the node that is done first joins again and waits; the other's survivors are not ended for it."""
    options = ["--nnodes", "2", "--nproc-per-node", "2"]
    port = str(free_port())
    both = []
    with contextlib.ExitStack() as stack:
        for node in range(2):
            if backend == "c10d":
                place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j"]
                place += ["--local-addr", "127.0.0.1"]
            else:
                place = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
            both.append(stack.enter_context(Launch(tmp_path, NODES, *options, *place, name=f"node{node}")))
        assert [job.wait() for job in both] == [0, 0], "".join(job.text for job in both)
        assert both[0].notes("persisted") == ["persisted-0-0", "persisted-1-0", "persisted-2-0"]
        assert [n for n in both[0].notes("begun") if n.endswith("-1")] == [f"begun-{rank}-1" for rank in range(4)]
        for job in both:
            job.assert_nothing_left()


DRIVER = """
import os, sys
from pathlib import Path
from torch.distributed import run
from ttp.launch.arguments import make_parser
from ttp.launch.main import launch
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.hosts.topology import choose_rendezvous

args = make_parser().parse_args()
out = Path(args.training_script_args[0])

def note(name, text=""):
    (out / f".{name}").write_text(text)
    (out / f".{name}").rename(out / name)

class Link:
    attached = True
    sent_away_monotonic_s = None
    lease_s = 0.0
    def __init__(self, address, job_id, pids, running):
        self.address = address
        note(f"link-{address}", f"{job_id} {sorted(pids)}")
    def worker_exit(self, rank, pid, text):
        note(f"reported-{self.address}-{rank}-{text.replace(' ', '_')}", str(pid))
    def add_controllers(self, addresses):
        pass
    def close(self):
        note(f"closed-{self.address}")

choose_rendezvous(args)
config, command, command_args = run.config_from_args(args)
launch(config, command, command_args, LaunchContext(
    total_timeout_s=60.0, poll_s=0.002, open_link=Link,
    request_shutdown=lambda address: note(f"shutdown-{address}")))
"""
LED = """
import subprocess
from torch.distributed import TCPStore
def persist(*_):
    time.sleep(2)
    note("persisted")
    os._exit(75)
signal.signal(signal.SIGTERM, persist)
here = f"controller:{start}"
if rank == 0:
    stop = str(out / f"shutdown-{here}")
    code = f"import os, time\\nwhile not os.path.exists({stop!r}): time.sleep(0.01)"
    controller = subprocess.Popen([sys.executable, "-c", code, "ttp.controller"], start_new_session=True)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"ttp/controller/{os.environ['TTP_ATTEMPT']}", f"{here} {controller.pid}")
await_file(f"link-{here}")
if start == "0":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_file(f"reported-{here}-1-signal_SIGKILL")
    sys.exit(75)
note("begun")
time.sleep(600)
"""


def test_the_controller_is_informed_of_deaths_and_leads_the_workers_at_a_signal(tmp_path: Path) -> None:
    """The launcher finds it in the workers' store in each attempt. Ctrl-C becomes its notice, SIGTERM, and the workers have a
    fault's time to persist, more than --shutdown-timeout; then the controller is asked to leave."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    options = ("--nproc-per-node", "2", "--shutdown-timeout", "1")
    with Launch(tmp_path, LED, *options, program=[str(driver)]) as job:
        job.await_notes("begun-0-1", "begun-1-1")
        run_id, _, ranks = job.read("link-controller:0").partition(" ")
        assert run_id and ranks == "[0, 1]"
        assert (tmp_path / "shutdown-controller:0").exists() and (tmp_path / "closed-controller:0").exists()
        assert job.notes("persisted") == []
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 1
        assert job.notes("persisted") == ["persisted-0-1", "persisted-1-1"]
        assert (tmp_path / "shutdown-controller:1").exists()
        assert (tmp_path / "reported-controller:1-0-exit_code_75").exists()
        job.assert_nothing_left()


CONTROLLED = """
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import start_controller
from ttp.runtime.standby import term_of
from torch.distributed import TCPStore
journal = out / f"journal-{start}.jsonl"
if rank == 0:
    start_name = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TTP_ATTEMPT']}"
    process = start_controller(ControllerSettings(start_name, term_of(int(os.environ["TTP_ATTEMPT"])), 2), journal)
    note("controller", process.pid)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"ttp/controller/{os.environ['TTP_ATTEMPT']}", f"{process.address} {process.pid}")
end = time.monotonic() + 180
def recorded(text):
    return journal.exists() and text in journal.read_text()
while start == "0" and not recorded("agent_attached" if rank == 1 else "death_seen"):
    if time.monotonic() > end:
        sys.exit(f"the journal says {journal.read_text() if journal.exists() else 'nothing'}")
    time.sleep(0.01)
if start == "0":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(75)
"""


def test_the_real_controller_learns_of_a_death_and_ends_with_the_job(tmp_path: Path) -> None:
    """Through the store, the launcher's link and the controller's own journal; none remains, whichever rank died."""
    plain = {"TTP_TLS": "False"}  # these workers have no session, and seal nothing
    with Launch(tmp_path, CONTROLLED, "--nproc-per-node", "2", environ=plain) as job:
        assert job.wait() == 0, job.text
        assert job.notes("controller") == ["controller-0-0", "controller-0-1"]
        assert (
            "restarting (1 of 3 restarts): rank 1: signal SIGKILL; rank 0: exited for the restart (exit code 75)"
            in job.text
        )
        job.assert_nothing_left()
