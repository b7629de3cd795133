"""The GPT2-13B example: rank tables are made and merged, and the script's five arguments become a command or one line that refuses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.examples.loading import EXAMPLES, module_of
from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser
from ttp.launch.hosts.rank_table import read_rank_table

FOLDER = EXAMPLES / "gpt2_13b"
CONFIG = str(FOLDER / "configs" / "gpt2" / "run_gpt2_13b.yaml")
DOCUMENT = str(Path(__file__).parent / "gpt2_13b" / "rank_table.json")
"""The table of four machines of the document."""

RUN = module_of("gpt2_13b/tools/run_distribute.py")


def tool(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a tool of the example as its users do."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "tools" / name), *arguments],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_tables_are_made_on_each_machine_and_merged(tmp_path: Path) -> None:
    """As the document merges them: server_count, and rank ids that ascend; addresses of devices where the machine has them."""
    conf = tmp_path / "hccn.conf"
    conf.write_text(
        "".join(f"address_{number}=192.{number + 1}.27.6\nnetmask_{number}=255.255.0.0\n" for number in range(8))
        + "#address_3=192.9.9.9\n"
    )
    first = tool(
        "hccl_tools.py", "--device_num", "[0,8)", "--server_ip", "127.0.0.1", "--hccn_conf", str(conf), cwd=tmp_path
    )
    second = tool(
        "hccl_tools.py", "--device_num=[0,4)", "--visible_devices=4,5,6,7", "--server_ip=127.0.0.2", cwd=tmp_path
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.strip() == str(tmp_path / "hccl_8p_01234567_127.0.0.1.json")
    made = json.loads(Path(first.stdout.strip()).read_text())
    assert made["server_list"][0]["device"][3] == {"device_id": "3", "device_ip": "192.4.27.6", "rank_id": "3"}
    merged = tool("merge_hccl.py", first.stdout.strip(), second.stdout.strip(), cwd=tmp_path)
    assert merged.returncode == 0 and merged.stdout.strip() == str(tmp_path / "hccl_2s_12p.json"), merged.stderr
    content = json.loads(Path(merged.stdout.strip()).read_text())
    assert (content["version"], content["server_count"], content["status"]) == ("1.0", "2", "completed")
    table = read_rank_table(merged.stdout.strip())
    assert [server.ranks for server in table.servers] == [tuple(range(8)), (8, 9, 10, 11)]
    assert [server.device_ids for server in table.servers] == [tuple(range(8)), (4, 5, 6, 7)]
    twice = tool("merge_hccl.py", first.stdout.strip(), first.stdout.strip(), cwd=tmp_path)
    assert twice.returncode == 2 and re.fullmatch(
        r"merge_hccl.py: invalid \S+16p\.json: .*device_id: got 0, which.*\n", twice.stderr
    )
    assert not (tmp_path / "hccl_2s_16p.json").exists() and not list(tmp_path.glob(".*"))


def test_a_range_counts_the_visible_devices() -> None:
    """Its end is left out in both spellings."""
    device_ids = module_of("gpt2_13b/tools/hccl_tools.py").device_ids
    assert device_ids("[2,4)", None) == device_ids("[2,4]", None) == [2, 3]
    assert device_ids("[1,3)", "7,5,3") == [5, 3]


def test_a_machine_is_known_by_the_address_of_its_host_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning where no other machine can reach it, and no table without an address."""
    hccl_tools = module_of("gpt2_13b/tools/hccl_tools.py")
    for found, warned in (("10.0.0.7", False), ("127.0.1.1", True)):
        monkeypatch.setattr(hccl_tools.socket, "gethostbyname", lambda _, found=found: found)
        assert hccl_tools.server_address("") == found
        assert ("reached from this machine only. Give --server_ip" in capsys.readouterr().err) == warned

    def unknown(_: str) -> str:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(hccl_tools.socket, "gethostbyname", unknown)
    with pytest.raises(ConfigError, match=r"has no address \(Name or service not known\). Give --server_ip"):
        hccl_tools.server_address("")


def test_a_merged_table_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    """A table of the other form, or none at all, is refused by its name."""
    own = {"rank_id": "0", "server_id": "10.0.0.1", "devices": [{"device_id": "0"}]}
    (tmp_path / "group.json").write_text(json.dumps({"group_list": [{"instance_list": [own]}]}))
    done = tool("merge_hccl.py", DOCUMENT, "--output", "all.json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads((tmp_path / "all.json").read_text()) == json.loads(
        Path(DOCUMENT).read_text()
    )
    for name, expected in (
        ("group.json", "group.json: got a table with group_list"),
        ("no.json", "cannot read --rank_table_file no.json: No such file or directory"),
    ):
        done = tool("merge_hccl.py", DOCUMENT, name, "--output", "other.json", cwd=tmp_path)
        assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / "other.json").exists()


def test_the_documents_table_is_what_the_tools_would_merge() -> None:
    """Its form and its numbers."""
    hccl_tools = module_of("gpt2_13b/tools/hccl_tools.py")
    table = json.loads(Path(DOCUMENT).read_text())
    assert hccl_tools.table_of(table["server_list"]) == table and len(read_rank_table(DOCUMENT).servers) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device_num", "[8,0)"], r"--device_num: got '\[8,0\)', expected a range"),
        (["--device_num", "8"], "--device_num: got '8', expected a range"),
        (["--device_num", "[3,3)"], r"--device_num: got '\[3,3\)', expected a range"),
        (["--device_num", "[0,1025)"], r"--device_num: got '\[0,1025\)', expected a range"),
        (["--visible_devices", "0,00,1"], "--visible_devices: got '0,00,1', expected different device ids"),
        (["--visible_devices", "0,1"], r"got 2 devices, expected 8 or more"),
        (["--server_ip", "192.0.2.1"], "--server_ip: got '192.0.2.1', expected one of 127.0.0.1"),
        (["--hccn_conf", "nosuch"], "--hccn_conf: got 'nosuch', expected a file that is there"),
        (["--hccn_conf", "short.conf"], "short.conf: has no address_1, expected one for each device"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, status 2, no file."""
    monkeypatch.chdir(tmp_path)
    Path("short.conf").write_text("address_0=192.1.27.6\n")
    assert module_of("gpt2_13b/tools/hccl_tools.py").main(["--server_ip", "127.0.0.1", *arguments]) == 2
    output = capsys.readouterr().err
    assert re.fullmatch(f"hccl_tools.py: .*{expected}.*\n", output) and not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(("node", "device_range"), list(enumerate(["[0,8]", "[8,16]", "[16,24]", "[24,32]"])))
def test_the_documents_four_commands(node: int, device_range: str) -> None:
    """Each machine's range is its place in the table; ttprun's own parser takes the command."""
    more = "--training_config.training_iters=7"
    for environ, port in (({}, 29500), ({"MASTER_PORT": "7000"}, 7000)):
        words = RUN.command([DOCUMENT, CONFIG, device_range, "train", "32", more], environ)
        assert words[0] == "ttprun"
        args = make_parser().parse_args(words[1:])
        assert (args.rank_table_file, int(args.node_rank), args.master_port) == (DOCUMENT, node, port)
    assert args.module and args.training_script == "ttp.trainer"
    assert args.training_script_args == ["--config", CONFIG, more]
    assert RUN.command([DOCUMENT, CONFIG, device_range.replace("]", ")"), "train", "32", more], environ) == words
    words = RUN.command([DOCUMENT, CONFIG, device_range, "predict", "32"], {"PROMPT": "Once"})
    assert bool(words) == (node == 0)
    if words:
        assert words[2:] == ["ttp.trainer.generate", "--checkpoint", "./output", "--prompt", "Once"]
        own = ["--prompt", "Twice", "--checkpoint=elsewhere"]
        assert RUN.command([DOCUMENT, CONFIG, device_range, "predict", "32", *own], {})[3:] == own


def test_the_pages_own_command_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that it is typed in: the shipped file's ranks are the table's."""
    page = (EXAMPLES.parent / "docs" / "from" / "mindformers_gpt2.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)^bash run_distribute\.sh \S+ (.*)$", page)
    monkeypatch.chdir(FOLDER / "scripts")
    assert RUN.command([DOCUMENT, *line.split()], {})[0] == "ttprun"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "arguments: got 0, expected 5 or more. Usage: run_distribute.sh RANK_TABLE_FILE"),
        ([DOCUMENT, CONFIG, "[0,8]", "train"], "arguments: got 4, expected 5 or more"),
        ([DOCUMENT, CONFIG, "[0,4]", "train", "32"], "DEVICE_RANGE: got '[0,4]', expected the ranks of one server"),
        ([DOCUMENT, CONFIG, "0,8", "train", "32"], "[0,8] for 10.155.111.140, [8,16] for 10.155.111.141"),
        ([DOCUMENT, CONFIG, "[0,8]", "eval", "32"], "RUN_MODE: got 'eval', expected train or predict"),
        ([DOCUMENT, CONFIG, "[0,8]", "train", "8"], "RANK_SIZE: got '8', expected 32, the ranks of"),
        (
            ["nosuch.json", CONFIG, "[0,8]", "train", "8"],
            "cannot read --rank_table_file nosuch.json: No such file or directory",
        ),
        ([DOCUMENT, "nosuch.yaml", "[0,8]", "train", "32"], "no such file, and no such preset"),
        (
            [DOCUMENT, CONFIG.replace("13b.yaml", "52b.yaml"), "[0,8]", "train", "32"],
            "data_parallel: got 8, expected 2 for 32 ranks",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: list[str], expected: str) -> None:
    """Before anything starts, with what is expected."""
    with pytest.raises(ConfigError) as caught:
        RUN.command(arguments, {})
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_script_hands_its_arguments_on(tmp_path: Path) -> None:
    """From any folder; an error is one line and status 2."""
    script = str(FOLDER / "scripts" / "run_distribute.sh")
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", script, DOCUMENT, CONFIG, "[0,9]", "train", "32"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("run_distribute.sh: DEVICE_RANGE: got '[0,9]'")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_what_needs_no_process_or_has_none_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On other machines than the first `predict` has nothing to do; without ttprun in PATH there is nothing to start."""
    monkeypatch.setenv("PATH", "/nosuch")
    for device_range, mode, status, expected in (
        ("[8,16]", "predict", 0, "the first machine generates the text"),
        ("[8,16]", "train", 2, "ttprun: No such file or directory. Install ttp where PATH finds it"),
    ):
        monkeypatch.setattr(sys, "argv", ["run_distribute.py", DOCUMENT, CONFIG, device_range, mode, "32"])
        assert RUN.main() == status
        output = capsys.readouterr().err
        assert output.startswith("run_distribute.sh: ") and expected in output and output.count("\n") == 1
