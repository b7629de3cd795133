"""Fault descriptions are parsed strictly and hit only the rank, step, point and attempt that they name."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.waiting import replace_sleep
from ttp.chaos.faults.inject import InjectedFault, Injection, injector, parse_faults, start_injector
from ttp.errors import ConfigError


def test_faults_are_parsed() -> None:
    """Several faults, with and without a round."""
    text = "kill:rank=2,step=7,point=updating; raise:rank=0,step=3,point=ready,round=1"
    assert parse_faults(text) == (Injection("kill", 2, 7, "updating"), Injection("raise", 0, 3, "ready", 1))
    assert parse_faults("") == ()
    assert parse_faults("slow:rank=0,step=3,point=done,for=2.5") == (Injection("slow", 0, 3, "done", for_s=2.5),)
    expected = Injection("kill", 1, 4, "publish", call=1, call_name="rename")
    assert parse_faults("kill:rank=1,step=4,point=publish,call=rename.1") == (expected,)
    assert parse_faults("eio:rank=1,step=4,point=write,call=2,times=1") == (
        Injection("eio", 1, 4, "write", call=2, times=1),
    )


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:rank=1",
        "burn:rank=1,step=2,point=ready",
        "kill:rank=x,step=2,point=ready",
        "kill:rank=1,step=2,point=lunch",
        "kill:rank=1,rank=2,step=2,point=ready",
        "kill:rank=1,step=2,point=ready,colour=red",
        "eio:rank=1,step=2,point=ready",
        "kill:rank=1,step=2,point=ready,call=1",
        "kill:rank=1,step=2,point=write,call=rename",
        "slow:rank=1,step=2,point=ready,for=long",
        "slow:rank=1,step=2,point=ready,for=nan",
        "slow:rank=1,step=2,point=ready,for=-1",
        "memory:rank=1,step=2,point=ready,mib=" + "9" * 30,
        "kill:rank=-1,step=2,point=ready",
        "kill:rank=1,step=" + "1" * 4000 + ",point=ready",
    ],
)
def test_wrong_fault_is_refused_by_name(text: str) -> None:
    """The error quotes the fault and says what was expected."""
    with pytest.raises(ConfigError, match="TTP_FAULTS") as caught:
        parse_faults(text)
    assert len(str(caught.value)) < 1000


def test_hook_acts_at_its_place_only() -> None:
    """Other ranks and rounds get no hook at all, other steps and points pass."""
    faults = parse_faults("raise:rank=1,step=4,point=ready")
    assert injector(faults, 0, 0) is None
    assert injector(faults, 1, 1) is None
    hook = injector(faults, 1, 0)
    assert hook is not None
    hook("ready", 3)
    hook("done", 4)
    with pytest.raises(InjectedFault, match="rank 1, step 4"):
        hook("ready", 4)


def test_a_fault_of_a_process_in_a_lost_ones_place_is_not_the_first_ones() -> None:
    faults = parse_faults("raise:rank=1,step=4,point=ready;raise:rank=1,step=6,point=done,again=1")
    first, again = injector(faults, 1, 0), injector(faults, 1, 0, again=True)
    assert first is not None and again is not None
    again("ready", 4)
    first("done", 6)
    with pytest.raises(InjectedFault, match="step 6"):
        again("done", 6)


def injected(action: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        "import os, signal, threading, time\n"
        "from ttp.chaos.faults.inject import injector, parse_faults\n"
        f"hook = injector(parse_faults('{action}:rank=0,step=1,point=done'), 0, 0)\n"
        f"{before}\n"
        "hook('done', 1)\n"
        f"{after}\n"
    )
    return subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(("action", "status"), [("kill", -9), ("segv", -11), ("abort", -6), ("term", -15), ("exit", 1)])
def test_deaths_are_real(action: str, status: int) -> None:
    """The process ends by the signal, without Python's leave."""
    assert injected(action).returncode == status


def test_a_term_goes_on_where_it_is_handled() -> None:
    done = injected("term", "signal.signal(signal.SIGTERM, lambda *_: print('notice'))", "print('on')")
    assert done.stdout.split() == ["notice", "on"] and done.returncode == 0


def test_a_hang_leaves_other_threads_running() -> None:
    """The main thread never comes back; a side thread ends the process."""
    assert injected("hang", "threading.Thread(target=lambda: (time.sleep(0.3), os._exit(7))).start()").returncode == 7


def test_pythons_lock_is_held_for_good() -> None:
    """No other thread of the process runs, and SIGTERM changes nothing: only SIGKILL does."""
    code = (
        "import signal, threading, time\n"
        "from ttp.chaos.faults.inject import injector, parse_faults\n"
        "def side():\n"
        "    while True:\n"
        "        print('alive', flush=True)\n"
        "        time.sleep(0.001)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        "threading.Thread(target=side, daemon=True).start()\n"
        "print('holding', flush=True)\n"
        "injector(parse_faults('gil:rank=0,step=1,point=done'), 0, 0)('done', 1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while "holding" not in process.stdout.readline():
            pass
        until_silent(process.stdout.fileno())
        process.send_signal(signal.SIGTERM)
        assert not select.select([process.stdout], [], [], 0.5)[0] and process.poll() is None
    finally:
        process.kill()
        process.communicate()


def until_silent(descriptor: int) -> None:
    """Read until nothing has come for two seconds: longer than any pause between two lines, on a busy machine too."""
    while select.select([descriptor], [], [], 2.0)[0]:
        assert os.read(descriptor, 1 << 16)


def test_a_slow_point_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    replace_sleep(monkeypatch, slept.append)
    hook = injector(parse_faults("slow:rank=0,step=1,point=done,for=2.5"), 0, 0)
    assert hook is not None
    hook("done", 1)
    hook("done", 1)
    assert slept == [2.5], "once, however often the point is passed"


def test_points_of_an_attempts_startup_have_no_step_and_are_hit_in_their_attempt_only() -> None:
    """A fault at an attempt's startup is committed at its point, by its rank, in its attempt."""
    faults = parse_faults("raise:rank=1,point=loaded,round=2; raise:rank=1,step=4,point=ready,round=2")
    assert faults[0] == Injection("raise", 1, 0, "loaded", 2)
    for rank, round_number in ((0, 2), (1, 1)):
        start_injector(faults, rank, round_number)("loaded")
    at_point = start_injector(faults, 1, 2)
    at_point("resume")
    with pytest.raises(InjectedFault, match="rank 1, step 0: fault injected at loaded"):
        at_point("loaded")
    with pytest.raises(ConfigError, match="no step at start, protected, resume, loaded"):
        parse_faults("kill:rank=1,step=3,point=loaded")
