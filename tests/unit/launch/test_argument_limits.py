"""Values of torchrun's own options that would end in a traceback of torch's, once workers run, are refused in one line."""

from __future__ import annotations

import pytest

from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser
from ttp.launch.checks import check_arguments

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def check(*options: str) -> None:
    check_arguments(make_parser().parse_args([*options, "train.py"]))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHUTDOWN_VARIABLE, raising=False)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_signal_that_no_process_can_handle_is_refused_by_name(name: str) -> None:
    """torch ends in a traceback as it installs its handlers."""
    with pytest.raises(ConfigError, match=f"^invalid --signals-to-handle: got '{name}', which no process can handle"):
        check("--signals-to-handle", f"SIGTERM,{name}")
    with pytest.raises(ConfigError, match=f"^invalid --signals-to-handle: got ' {name}'"):
        check("--signals-to-handle", f"SIGTERM, {name}")


@pytest.mark.parametrize("given", [-1, 2**31, 10**400])
def test_a_shutdown_timeout_that_is_out_of_bounds_is_refused(given: int) -> None:
    """torch adds it to a time when it ends the workers, and not before."""
    with pytest.raises(ConfigError) as refused:
        check(f"--shutdown-timeout={given}")
    message = str(refused.value)
    assert message.startswith("invalid --shutdown-timeout: got ") and "\n" not in message and len(message) < 200
    assert message.endswith(", expected an integer from 0 to 2147483647 (seconds). Correct or omit it")


@pytest.mark.parametrize("given", ["-1", str(2**31), "1" * 5000, "soon", ""])
def test_a_shutdown_timeout_of_the_environment_is_held_to_the_same_bounds(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the variable where the option is not given, and only then."""
    monkeypatch.setenv(SHUTDOWN_VARIABLE, given)
    with pytest.raises(ConfigError, match=f"^invalid {SHUTDOWN_VARIABLE}: got .*, expected an integer from 0 to "):
        check()
    check("--shutdown-timeout", "5")


def test_shutdown_timeouts_within_the_bounds_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable as torch reads it, with spaces around the number."""
    check()
    for seconds in (0, 2**31 - 1):
        check("--shutdown-timeout", str(seconds))
        monkeypatch.setenv(SHUTDOWN_VARIABLE, f" {seconds} ")
        check()


def test_a_version_of_torch_without_a_shutdown_timeout_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_parser().parse_args(["train.py"])
    del args.shutdown_timeout
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "soon")
    check_arguments(args)
