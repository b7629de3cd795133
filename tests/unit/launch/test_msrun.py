"""The options of msrun mean to ttprun what they mean to msrun, and a bad one is refused in a line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser
from ttp.launch.hosts.topology import choose_rendezvous, explicit_arguments
from ttp.launch.main import main
from ttp.launch.msrun import apply_msrun

WORKERS = ("--worker_num", "4", "--local_worker_num=4")


def parsed(*line: str) -> argparse.Namespace:
    """Return the arguments as `ttprun` settles them before torch reads them."""
    argv = [*line, "train.py"]
    args = make_parser().parse_args(argv)
    apply_msrun(args, explicit_arguments(make_parser, argv))
    choose_rendezvous(args)
    return args


def test_the_command_of_mindformers_page_is_that_of_torchrun(tmp_path: Path) -> None:
    """One node, the page's port, 300 s to meet, and the workers' output in the log folder."""
    line = ("--master_port=8828", f"--log_dir={tmp_path}", "--join=True", "--cluster_time_out=300")
    args = parsed(*WORKERS, *line)
    config, _, _ = torchrun.config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 4)
    assert config.rdzv_endpoint.endswith(":8828") and config.rdzv_configs["timeout"] == "300"
    assert (args.log_dir, args.tee) == (str(tmp_path), "3")


def test_several_nodes_with_numbers_meet_statically_and_without_number_themselves() -> None:
    """-1 is msrun's default, and 8118 its port."""
    two = ("--worker_num=8", "--local_worker_num=4", "--master_addr=node-a")
    args = parsed(*two, "--node_rank=1", "--master_port=29501")
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert (args.rdzv_backend, args.master_addr, args.master_port) == ("static", "node-a", 29501)
    for line in ((), ("--node_rank=-1",)):
        args = parsed(*two, *line, "--cluster_time_out=60", "--rdzv-conf=join_timeout=90")
        assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == ("2", "c10d", "node-a:8118")
        config, _, _ = torchrun.config_from_args(args)
        assert (config.rdzv_configs["timeout"], config.rdzv_configs["join_timeout"]) == ("60", "90")
    assert parsed(*WORKERS, "--node_rank=-1", "--master_port=8828").node_rank == 0


def test_what_the_user_says_of_the_workers_output_counts() -> None:
    """Without --log_dir nothing is written."""
    assert parsed(*WORKERS, "--log_dir=logs", "--redirects=1").tee == "0"
    assert parsed(*WORKERS).tee == "0"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("--join=False",), "--join: got False, expected True: ttprun stays until the job has ended"),
        (("--worker_num=4",), "--local_worker_num: got nothing, expected a count beside the other's 4. Give both"),
        (("--local_worker_num=4",), "--worker_num: got nothing, expected a count beside the other's 4. Give both"),
        (
            ("--worker_num=6", "--local_worker_num=4"),
            "--worker_num: got 6 with --local_worker_num 4, expected a multiple",
        ),
        (
            ("--worker_num=2", "--local_worker_num=4"),
            "--worker_num: got 2 with --local_worker_num 4, expected a multiple",
        ),
        ((*WORKERS, "--nproc_per_node=4"), "--nproc-per-node: got it with --worker_num, expected one of the two"),
        (
            (*WORKERS, "--rank_table_file=hccl.json"),
            "--rank-table-file: got it with --worker_num, expected one of the two",
        ),
    ],
)
def test_what_cannot_be_is_refused(line: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """By ttprun itself, in one line, with status 2."""
    with pytest.raises(ConfigError) as caught:
        parsed(*line)
    assert text in str(caught.value)
    with pytest.raises(SystemExit) as ended:
        main([*line, "train.py"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.splitlines() == [f"ttprun: error: {caught.value}"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--worker_num=0", "got '0', expected an integer from 1 to"),
        ("--local_worker_num=two", "got 'two', expected an integer from 1 to"),
        ("--cluster_time_out=-1", "got '-1', expected an integer from 1 to"),
        ("--join=yes", "got 'yes', expected True or False"),
    ],
)
def test_bad_values_are_refused_by_the_parser(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([line, "train.py"])
    assert ended.value.code == 2 and text in capsys.readouterr().err
