"""ttprun's command line is torchrun's, with a group more."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig

from tests.unit.checkpoint.signing import make_keys
from ttp.errors import ConfigError
from ttp.exchange import discovery
from ttp.launch import arguments
from ttp.launch.arguments import hides_stderr, make_parser
from ttp.launch.checks import GLOO_TLS_FILES, check_arguments
from ttp.launch.hosts import topology
from ttp.launch.hosts.topology import choose_rendezvous
from ttp.launch.main import main
from ttp.launch.rendezvous import choose
from ttp.launch.rendezvous.choose import store_host

OWN_FLAGS = [
    "--health-check",
    "--health_check",
    "--on-event",
    "--on_event",
    "--preload",
    "--rank-table-file",
    "--rank_table_file",
    "--secret-file",
    "--secret_file",
    "--sign-key",
    "--sign_key",
    "--spare-node",
    "--spare_node",
    "--status-port",
    "--status-token-file",
    "--status_port",
    "--status_token_file",
    "--ttp-death-poll",
    "--ttp-futile-starts",
    "--ttp-ot",
    "--ttp-story",
    "--ttp_death_poll",
    "--ttp_futile_starts",
    "--ttp_ot",
    "--ttp_story",
    "--verify-key",
    "--verify_key",
]
OF_MSRUN = [
    "--cluster-time-out", "--cluster_time_out", "--join", "--local-worker-num", "--local_worker_num", "--worker-num", "--worker_num",
]  # fmt: skip
OWN_DEFAULTS: dict[str, object] = {
    "ttp_ot": None,
    "ttp_death_poll": None,
    "ttp_futile_starts": 3,
    "ttp_story": None,
    "on_event": "",
    "health_check": "",
    "status_port": None,
    "status_token_file": None,
    "preload": [],
    "secret_file": "",
    "spare_node": False,
    "sign_key": None,
    "verify_key": None,
    "rank_table_file": None,
    "worker_num": None,
    "local_worker_num": None,
    "cluster_time_out": None,
    "join": None,
}
LINES = [
    ["train.py"],
    ["--standalone", "--nproc-per-node", "4", "train.py", "--lr", "1"],
    ["--nnodes=2", "--node_rank=1", "--nproc_per_node=8", "--master_addr=10.0.0.1", "--master_port=29501", "-m", "pkg"],
    [
        "--nnodes",
        "1:4",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "h:1",
        "--rdzv-id",
        "j",
        "--max-restarts",
        "7",
        "x",
    ],
    ["--no-python", "--log-dir", "logs", "--redirects", "3", "--tee", "0:1", "bash", "-c", "true"],
    ["--nnodes", "1", "--monitor-interval", "1", "--role", "r", "train.py", "--ttp-ot", "not-ours"],
]


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {text for action in parser._actions for text in action.option_strings}


def test_the_flags_are_torchruns_and_ours() -> None:
    """Nothing of torchrun's is missing, and our own are frozen."""
    assert sorted(flags(make_parser()) - flags(torchrun.get_args_parser())) == sorted(OWN_FLAGS + OF_MSRUN)
    assert flags(torchrun.get_args_parser()) <= flags(make_parser())


def test_the_documents_table_is_that_of_the_parser() -> None:
    """Every own option with its default and the beginning of its help, and no other."""
    groups = [group for group in make_parser()._action_groups if group.title in ("ttp", "msrun")]
    actions = [action for group in groups for action in group._group_actions]
    text = (Path(__file__).resolve().parents[3] / "docs" / "ttprun_reference.md").read_text()
    rows = re.findall(r"^\| `(--\S+?)(?: ([A-Z,\[\]]+|True))?` \| (.*?) \| (.*?) \|$", text, re.M)
    assert [row[:2] for row in rows] == [(a.option_strings[0], a.metavar or "") for a in actions]
    for (_, _, default, meaning), action in zip(rows, actions, strict=True):
        assert (action.help or "").startswith(meaning), meaning
        unset = {
            "ttp_ot": "`TTP_OT` or 120",
            "ttp_story": "`story.jsonl` beside the journals",
            "preload": "what earlier workers had imported",
            "secret_file": "`TTP_SECRET_FILE`, `TTP_SECRET`; on one node a new secret for each job",
            "spare_node": "off",
            "ttp_death_poll": "0.01; 0.02 beside accelerators",
            "sign_key": "`TTP_SIGN_KEY`",
            "verify_key": "`TTP_VERIFY_KEY`",
            "status_port": "`TTP_STATUS_PORT`",
            "status_token_file": "`TTP_STATUS_TOKEN_FILE`",
        }
        assert default == unset.get(action.dest, str(action.default or "none"))


@pytest.mark.parametrize("line", LINES, ids=[" ".join(line[:2]) for line in LINES])
@pytest.mark.parametrize("enabled", ["True", "False"])
def test_torchruns_lines_mean_the_same(line: list[str], enabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the default number of restarts, and that too with ENABLE_TTP=False."""
    monkeypatch.setenv("ENABLE_TTP", enabled)
    ours = vars(make_parser().parse_args(line))
    theirs = vars(torchrun.get_args_parser().parse_args(line))
    assert {name: ours.pop(name) for name in OWN_DEFAULTS} == OWN_DEFAULTS
    if "--max-restarts" not in line:
        assert theirs["max_restarts"] == 0
        theirs["max_restarts"] = 3 if enabled == "True" else 0
    assert ours == theirs


def abbreviations() -> list[str]:
    """Every beginning of an option of torchrun's, the whole ones too."""
    whole = [text for text in flags(torchrun.get_args_parser()) if text.startswith("--")]
    return sorted({text[:length] for text in whole for length in range(3, len(text) + 1)})


def meant(parser: argparse.ArgumentParser, text: str) -> str:
    """Say which option a text stands for, or what the parser says against it, the program's name apart."""
    parser.exit_on_error = False
    try:
        found = parser._parse_optional(text)
    except argparse.ArgumentError as error:
        return str(error)
    except SystemExit:
        return "ambiguous"
    first: object = found[0] if isinstance(found, list) else found
    action = first[0] if isinstance(first, tuple) else None
    return action.dest if action is not None else "unknown"


def test_an_abbreviation_means_what_it_means_to_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """`--t 3` is --tee, for one: TTP's options make none of torchrun's abbreviations ambiguous, and cure none."""
    line = ["--t", "3", "--nn", "2", "--max-r", "5", "train.py", "--t", "x"]
    ours, theirs = make_parser().parse_args(line), torchrun.get_args_parser().parse_args(line)
    assert (ours.tee, ours.nnodes, ours.max_restarts) == (theirs.tee, "2", 5)
    assert ours.training_script_args == ["--t", "x"]
    texts = abbreviations()
    assert "--t" in texts and "--r" in texts
    assert {text: meant(make_parser(), text) for text in texts} == {
        text: meant(torchrun.get_args_parser(), text) for text in texts
    }


@pytest.mark.parametrize("text", ["--r", "--n", "--ttp"])
def test_an_ambiguous_abbreviation_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Torchrun's own as by torchrun; of TTP's options too, where it is none of torchrun's."""
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([text, "3", "train.py"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"ambiguous option: {text}" in printed
    assert ("--ttp-ot" in printed) == (text == "--ttp")


def test_torchs_variable_for_restarts_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_MAX_RESTARTS is torchrun's way to set it from outside."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    assert int(make_parser().parse_args(["train.py"]).max_restarts) == 9


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_a_bad_time_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the option, what was given and what is expected."""
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args([f"--ttp-ot={value}", "train.py"])
    assert caught.value.code == 2
    assert f"--ttp-ot/--ttp_ot: got '{value}', expected seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize("line", LINES, ids=[" ".join(line[:2]) for line in LINES])
def test_the_rendezvous_is_chosen_as_torchrun_does(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with what torchrun hands to its own launcher."""
    seen = []

    class Stop(Exception):
        pass

    def stop(args: argparse.Namespace) -> None:
        seen.append(argparse.Namespace(**vars(args)))
        raise Stop

    monkeypatch.setattr(torchrun, "config_from_args", stop)
    with pytest.raises(Stop):
        torchrun.run(torchrun.get_args_parser().parse_args(line))  # type: ignore[no-untyped-call]
    ours = torchrun.get_args_parser().parse_args(line)
    choose_rendezvous(ours)
    names = ["rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "nnodes", "node_rank"]
    assert [getattr(ours, name) for name in names] == [getattr(seen[0], name) for name in names]
    chosen = (ours.rdzv_id == "none", seen[0].rdzv_id == "none")
    assert chosen[0] == chosen[1] and (ours.rdzv_backend != "c10d" or ours.rdzv_id)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        (["train.py"], "127.0.0.1"),
        (["--nnodes=2", "--master_addr=10.0.0.1", "--master_port=29501", "train.py"], "10.0.0.1"),
        (["--nnodes=2", "--local-addr=10.0.0.2", "--master_addr=10.0.0.1", "train.py"], "10.0.0.2"),
    ],
)
def test_the_workers_store_has_an_address_that_all_nodes_reach(line: list[str], host: str) -> None:
    """One node needs no name resolution; several use what the user gave."""
    args = torchrun.get_args_parser().parse_args(line)
    choose_rendezvous(args)
    config = torchrun.config_from_args(args)[0]
    assert store_host(config) == host


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (("--nproc-per-node", "two"), "Unsupported nproc_per_node value: two"),
        (("--nnodes", "x"), "invalid --nnodes: got 'x'"),
        (("--rdzv-backend", "nosuch"), "rendezvous backend 'nosuch' is not registered"),
        (
            ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "join_timeout=abc"),
            "invalid --rdzv-conf join_timeout: got 'abc', expected 0.001 to",
        ),
        (("--nnodes", "3:2"), "invalid --nnodes: got '3:2', expected a number of nodes >= 1"),
        (("--nnodes", "1:2:3"), "invalid --nnodes: got '1:2:3'"),
        (("--nnodes", "0"), "invalid --nnodes: got '0'"),
        (("--max-restarts", "-1"), "invalid --max-restarts: got -1, expected an integer from 0"),
        (("--nproc-per-node", "0"), "invalid --nproc-per-node: got '0' (0 workers), expected an integer from 1"),
        (("--nproc-per-node", "-1"), "invalid --nproc-per-node: got '-1'"),
        (("--log-dir", "/proc/nosuch"), "invalid --log-dir: got '/proc/nosuch' ("),
        (("--log-dir", "/proc"), "invalid --log-dir: got '/proc' ("),
        (("--log-dir", "/dev/zero"), "invalid --log-dir: got '/dev/zero' ("),
        (("--ttp-story", "/proc/nosuch/events"), "invalid --ttp-story: got '/proc/nosuch' ("),
        (("--ttp-story", "/proc"), "invalid --ttp-story: got the directory '/proc', expected a file"),
        (("--monitor-interval", "0"), "invalid --monitor-interval: got 0.0, expected 0.001 to 3600 seconds"),
        (("--monitor-interval", "1e-320"), "invalid --monitor-interval: got 1e-320, expected 0.001 to"),
        (("--rdzv-conf", "timeout=1e999"), "invalid --rdzv-conf timeout: got '1e999', expected 0.001 to"),
        (("--standalone", "--nnodes", "2"), "invalid --nnodes: got 2 with --standalone, expected 1"),
        (("--nproc-per-node", "1" * 5000), "Unsupported nproc_per_node value: 111"),
        (("--monitor-interval", "nan"), "invalid --monitor-interval: got nan"),
        (("--monitor-interval", "inf"), "invalid --monitor-interval: got inf"),
        (("--event-log-handler", "nosuch"), "invalid --event-log-handler: got 'nosuch', expected a registered one"),
        (("--signals-to-handle", "SIGTERM,FOO"), "invalid --signals-to-handle: got 'FOO', expected names of signals"),
        (
            ("--nnodes", "2", "--node-rank", "2", "--master-port", "1"),
            "invalid --node-rank: got 2 with --nnodes 2, expected 0 to 1",
        ),
        (("--nnodes", "2", "--node-rank", "-1", "--master-port", "1"), "invalid --node-rank: got -1"),
        (("--local-addr", "no such host"), "invalid --local-addr: got 'no such host', which does not resolve here ("),
        (("--preload", "a,,b"), "argument --preload: invalid module name: got '', expected names with dots"),
        (("--rank_table_file", ""), "invalid --rank_table_file: got an empty path, expected the path of a rank table"),
        (("--rank_table_file", " "), "invalid --rank_table_file: got an empty path, expected the path of a rank table"),
        (
            ("--sign-key", "/nosuch"),
            "invalid TTP_SIGN_KEY: got /nosuch (No such file or directory), expected an Ed25519",
        ),
        (("--verify-key", "/dev/null"), "invalid TTP_VERIFY_KEY: got /dev/null (expected a regular file), expected an"),
        (("--on-event", "no-such-program x"), "invalid --on-event: got 'no-such-program x', expected a command"),
        (("--status-port", "70000"), "got '70000', expected an integer from 0 to 65535"),
        (
            ("--status-token-file", "/nosuch"),
            "invalid TTP_STATUS_TOKEN_FILE='/nosuch': No such file or directory, expected",
        ),
        (("--ttp-ot", "1e10"), "got '1e10', expected seconds above 0, at most 1e+09"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_values_that_torchs_parser_lets_through_are_refused_in_a_line(
    given: tuple[str, ...],
    printed: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 2, nothing started, no traceback: the last line says it all, and is the only one of its kind."""
    for name in ("TTP_OT", "TTP_SIGN_KEY", "TTP_VERIFY_KEY", "TTP_STATUS_PORT", "TTP_STATUS_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that what an option sets is taken back
    with pytest.raises(SystemExit) as ended:
        main([*given, str(tmp_path / "train.py")])
    assert ended.value.code == 2
    errors = capfd.readouterr().err
    assert errors.splitlines()[-1].startswith("ttprun: error: ") and printed in errors.splitlines()[-1]
    assert errors.count("error: ") == 1 and "Traceback" not in errors


@pytest.mark.parametrize("enabled", ["True", "False"])
def test_the_workers_find_the_keys_wherever_they_run(
    enabled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By absolute paths; plain torchrun's workers save and resume too."""
    make_keys(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENABLE_TTP", enabled)
    names, seen = ("TTP_SIGN_KEY", "TTP_VERIFY_KEY"), list[list[str]]()
    for name in names:
        monkeypatch.setenv(name, "")
    for run in ("ttp.launch.main.launch", "torch.distributed.run.run"):
        monkeypatch.setattr(run, lambda *arguments: seen.append([os.environ[name] for name in names]))
    main(["--sign-key", "job.pem", "--verify-key=job.pub.pem", "train.py"])
    assert seen == [[f"{tmp_path}/job.pem", f"{tmp_path}/job.pub.pem"]]


def test_a_variable_that_nothing_reads_is_named_once_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped TTP_OT would else leave the default in force, in silence. Those of the launcher, the harness and the tests are
    known."""
    for name in [name for name in os.environ if name.startswith("TTP_")]:
        monkeypatch.delenv(name)
    for name in (
        "TTP_0T",
        "TTP_LEASE",
        "TTP_QQQQQQQQ",
        "TTP_TEST_MARK",
        "TTP_CHAOS",
        "TTP_START_ID",
        "TTP_ATTEMPT_DIR",
        "TTP_FORK_SERVER",
        "TTP_IDENTITY",
        "TTP_ATTEMPT",
        "TTP_ROUND_ID",
    ):
        monkeypatch.setenv(name, "1")
    logger = logging.getLogger("ttp.launch")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with pytest.raises(SystemExit):
        main(["--nnodes", "0", "train.py"])
    assert [record.message for record in caplog.records] == [
        "unknown environment variable TTP_0T is ignored: did you mean TTP_OT?",
        "unknown environment variable TTP_LEASE is ignored: did you mean TTP_LEASE_S?",
        "unknown environment variable TTP_QQQQQQQQ is ignored: TTP has no variable with a similar name",
    ]


def test_a_node_name_that_leads_nowhere_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several nodes reach each other by it. Exit status 2, with what was got, expected and next; nothing is started."""
    monkeypatch.setenv("TTP_HOST", "no such host")
    monkeypatch.setattr(topology, "RESOLVE_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        main(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1", "train.py"])
    assert ended.value.code == 2
    printed = capfd.readouterr().err
    assert "ttprun: error: invalid TTP_HOST: got 'no such host' on node " in printed and "does not resolve (" in printed
    assert "expected a name or address by which all 2 nodes reach this one. Correct it, or unset it" in printed


def test_a_name_is_asked_for_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may learn of a node after its launcher has begun. One node needs no name."""
    answers = [OSError("not yet"), OSError("not yet"), None]

    def resolve(host: str, port: None) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(discovery, "LONGEST_LOOK_S", 0.0)
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    topology.check_host_name("node-x", 1)
    assert len(answers) == 3
    topology.check_host_name("node-x", 2)
    assert answers == []


def test_the_machines_own_name_costs_a_warning_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a default, and other nodes may resolve it."""

    def resolve(host: str, port: None) -> None:
        raise OSError("unknown")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    topology.check_host_name(socket.gethostname(), 2)
    assert "does not resolve here (unknown)" in caplog.text and "Set TTP_HOST" in caplog.text


def test_plain_torchrun_gets_the_first_of_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job script that lists two is tried with ENABLE_TTP=False as it stands."""
    seen: list[str] = []
    monkeypatch.setenv("ENABLE_TTP", "False")
    monkeypatch.setattr(torchrun, "run", lambda args: seen.append(args.rdzv_endpoint))
    main(["--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29400,node-b:29400", "train.py"])
    assert seen == ["node-a:29400"]


@pytest.mark.parametrize("conf", ["store_type=file", "read_timeout=3, store_type = FILE"])
def test_plain_torchrun_gets_the_path_of_a_file_store_as_it_stands(
    conf: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a c10d store in a file the endpoint is a path; it may have a comma."""
    seen: list[str] = []
    monkeypatch.setenv("ENABLE_TTP", "False")
    monkeypatch.setattr(torchrun, "run", lambda args: seen.append(args.rdzv_endpoint))
    path = str(tmp_path / "a,b")
    main(["--rdzv-backend", "c10d", "--rdzv-endpoint", path, "--rdzv-conf", conf, "train.py"])
    assert seen == [path]


def test_a_backend_whose_client_is_missing_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports it when the handler is made."""

    def load(parameters: object) -> None:
        raise ModuleNotFoundError("No module named 'etcd'")

    monkeypatch.setattr(choose, "get_rendezvous_handler", load)
    config = LaunchConfig(1, 2, 1, run_id="j", rdzv_backend="etcd-v2", rdzv_endpoint="a:2379")
    with pytest.raises(ConfigError, match=r"got 'etcd-v2', whose client cannot be imported \(No module named 'etcd'\)"):
        choose.make_rendezvous(config)


def test_deaths_are_looked_for_half_as_often_beside_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the option says how often."""
    for present, expected in ((False, 0.01), (True, 0.02)):
        monkeypatch.setattr(arguments, "has_accelerator", lambda present=present: present)
        assert arguments.death_poll_s(make_parser().parse_args(["train.py"])) == expected
        assert arguments.death_poll_s(make_parser().parse_args(["--ttp-death-poll=0.002", "train.py"])) == 0.002


def test_a_poll_that_was_meant_in_milliseconds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A watch that looks every two seconds sees no death in time."""
    assert make_parser().parse_args(["--ttp-death-poll=1", "train.py"]).ttp_death_poll == 1.0
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["--ttp-death-poll=2", "train.py"])
    assert caught.value.code == 2
    assert "got '2', expected seconds (10 ms are 0.01) from 0.0001, at most 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "hidden"),
    [((), False), (("-r", "3"), True), (("-r", "1"), False), (("-t", "3"), False), (("-r", "0:2"), True),
     (("--local-ranks-filter", "0"), True)],
)  # fmt: skip
def test_it_is_known_whether_the_console_has_the_workers_errors(options: tuple[str, ...], hidden: bool) -> None:
    """Else the launcher quotes the traceback of the root cause."""
    assert hides_stderr(make_parser().parse_args([*options, "train.py"])) is hidden


@pytest.mark.parametrize("transport", ["TCP_TLS", pytest.param("UV", marks=pytest.mark.long)])
def test_a_transport_of_gloo_that_torch_lacks_is_refused_before_a_worker_starts(transport: str, tmp_path: Path) -> None:
    """In a process of its own: torch reads the variable once."""
    (tmp_path / "some.pem").touch()
    environ = {
        **os.environ,
        "GLOO_DEVICE_TRANSPORT": transport,
        **dict.fromkeys(GLOO_TLS_FILES, str(tmp_path / "some.pem")),
    }
    command = [sys.executable, "-m", "ttp.launch", "x.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"ttprun: error: invalid GLOO_DEVICE_TRANSPORT: got '{transport}', which torch .* refuses .*, or unset the variable: .*",
        done.stderr.strip().splitlines()[-1],
    )


def test_tls_of_gloo_needs_files_that_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    for name in GLOO_TLS_FILES:
        with pytest.raises(ConfigError, match=f"invalid {name}: got '', expected a file that can be read"):
            check_arguments(make_parser().parse_args(["x.py"]))
        (tmp_path / name).touch()
        monkeypatch.setenv(name, str(tmp_path / name))
