"""Command lines and the environment: understood, or refused with exit status 2 and one line."""

from __future__ import annotations

import contextlib
import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.checkpoint.cli.main import command_first
from ttp.checkpoint.cli.main import parser as ckpt_parser
from ttp.config import VARIABLES, Settings
from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser
from ttp.launch.main import _config_of
from ttp.trainer.__main__ import main as trainer_main

settings.load_profile("fuzz")

VALUES = (
    "0", "1", "2", "-1", "1e-320", "1e999", "nan", "inf", "-0.0", str(10**20), "1" * 5000, "x", "", " ", "True", "no", "1:2", "2:1", "²", "\udcff",
    "0.5", "3", "120", "/nonexistent/\0x", "gpu", "auto", "1,2", "1e9", "1e300", "0x10", "9" * 30,
)  # fmt: skip
NAMES = (*VARIABLES, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK",
         "LOCAL_WORLD_SIZE")  # fmt: skip


@given(st.randoms(use_true_random=True))
def test_the_environment_is_understood_or_refused(rng: random.Random) -> None:
    """What is understood is within bounds that timers and the wire take."""
    environ = {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randrange(1, 5))}
    try:
        found = Settings.from_env(environ)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        str(error).encode()
        return
    assert 1e-3 <= found.total_timeout_s <= 1e9 and 1e-3 <= found.heartbeat_s < found.lease_s <= 1e9
    for text in (found.host, found.job_id, found.mindio_dir, found.faults, found.chaos, found.master_addr):
        text.encode()
        assert "\0" not in text
    assert abs(found.round_number) < 2**31 and abs(found.master_port) < 2**31


OPTIONS = (
    "--nnodes", "--nproc-per-node", "--max-restarts", "--monitor-interval", "--ttp-ot", "--ttp-death-poll", "--ttp-futile-starts",
    "--node-rank", "--signals-to-handle", "--rdzv-conf", "--local-ranks-filter", "--redirects", "--tee", "--master-port", "--rdzv-backend",
)  # fmt: skip


@given(st.randoms(use_true_random=True))
def test_the_launchers_command_line_is_understood_or_refused(rng: random.Random) -> None:
    """Up to torch's own configuration: nothing is started. An exception of torch's own is none of ours to let through."""
    argv = [part for _ in range(rng.randrange(1, 4)) for part in (rng.choice(OPTIONS), rng.choice(VALUES))]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = make_parser().parse_args([*argv, "script.py"])
            config = _config_of(args)[0]
        except SystemExit as end:
            assert end.code in (0, 2)
            return
        except ConfigError as error:
            assert "\n" not in str(error) or "torch" in str(error)
            return
    assert 1 <= config.nproc_per_node <= 100_000 and config.max_nodes <= 1_000_000


@given(st.randoms(use_true_random=True))
def test_a_plan_is_made_or_refused(
    rng: random.Random,
) -> None:
    """`--plan` never begins what it cannot end."""
    argv = ["--plan"]
    for name in ("--world-size", "--devices-per-node", "--disk-gb-per-s"):
        if rng.random() < 0.7:
            argv += [name, rng.choice(VALUES)]
    if rng.random() < 0.5:
        argv += [
            f"--model_config.{rng.choice(('num_layers', 'num_experts', 'hidden_size', 'vocab_size'))}",
            rng.choice(VALUES[:20]),
        ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = trainer_main(argv)
    assert status in (0, 2) and (status == 0) == bool(out.getvalue())
    if status:
        assert err.getvalue().count("\n") == 1, err.getvalue()


@pytest.mark.parametrize("command", ["list", "prune", "diff", "verify"])
@given(st.randoms(use_true_random=True))
def test_a_command_line_of_checkpoints_is_understood_or_refused(command: str, rng: random.Random) -> None:
    argv = [command, *(rng.choice((*VALUES, "--keep", "--limit", "--json", "--yes")) for _ in range(rng.randrange(5)))]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            ckpt_parser().parse_args(command_first(argv))
        except SystemExit as end:
            assert end.code in (0, 2)
