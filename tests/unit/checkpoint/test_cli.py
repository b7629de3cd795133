"""What people and scripts see of `ttp ckpt`: text, JSON and the exit status, for whatever they name."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.damage import DATA, flip_a_bit, of_version, remove, truncate
from ttp.checkpoint.cli import main
from ttp.checkpoint.cli.output import Status
from ttp.checkpoint.cli.verify import run as verify
from ttp.proto.messages import Cause, CauseKind, CommitRecord

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"


def run(*arguments: str, terminal: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main(arguments, Console(file=out, width=300, force_terminal=terminal, no_color=True, highlight=False))
    return status, out.getvalue()


def test_a_directory_is_listed_newest_first(job: Job, tmp_path: Path) -> None:
    """Step, cause, lost ranks, tracker; 0 while all are whole."""
    job.save(tmp_path, 41)
    job.save(tmp_path, 42)
    status, text = run(str(tmp_path), "list")
    assert status == 0 and text.index(" 42 ") < text.index(" 41 ")
    assert "exited" in text and "complete" in text and "tracker: step 42" in text
    (tmp_path / "iter_0000041" / "__0_0_0.distcp").unlink()
    status, text = run(str(tmp_path), "list")
    assert status == 1 and "broken" in text and "__0_0_0.distcp is missing" in text


def test_ranks_with_a_preemption_notice_are_not_listed_as_lost(job: Job, tmp_path: Path) -> None:
    """They saved all, and left; the manifest names them all the same."""
    job.save(tmp_path, 42, cause=Cause(CauseKind.PREEMPTED, (0, 1), "SIGTERM"))
    assert re.search(r" 42 +preempted +- ", run(str(tmp_path), "list")[1])
    job.save(tmp_path, 43)
    assert re.search(r" 43 +exited +2 ", run(str(tmp_path), "list")[1])


def test_a_cause_that_is_no_ranks_names_none(job: Job, tmp_path: Path) -> None:
    """A checkpoint that was asked for; a fault names its ranks."""
    job.save(tmp_path, 42, cause=Cause(CauseKind.REQUESTED, (), "requested checkpoint of step 42"))
    assert re.search(r"^cause +requested: requested checkpoint of step 42$", run("inspect", str(tmp_path))[1], re.M)
    assert re.search(r" 42 +requested +- ", run("list", str(tmp_path))[1])
    job.save(tmp_path, 43, cause=Cause(CauseKind.EXITED, (1, 2, 5), "signal SIGKILL"))
    assert re.search(r"^cause +exited: signal SIGKILL \(ranks 1-2, 5\)$", run("inspect", str(tmp_path))[1], re.M)


def test_inspect_shows_all_there_is(job: Job, tmp_path: Path) -> None:
    """Of the newest, or of the one named; square brackets are shown as they are."""
    path = job.save(tmp_path, 42)
    for argument in (tmp_path, path):
        status, text = run(str(argument), "inspect")
        assert status == 0
        for shown in (
            "signal SIGKILL",
            "samples 336",
            "__2_0_0.distcp",
            "model.embed",
            "[13, 6]",
            "bfloat16",
            "1024",
        ):
            assert shown in text, shown


def test_verify_names_the_damage(job: Job, tmp_path: Path) -> None:
    """A flipped bit is found by checksums and, as promised, not by --shallow."""
    path = job.save(tmp_path, 42)
    assert run(str(path), "verify") == (0, run(str(path), "verify")[1]) and "VALID" in run(str(path), "verify")[1]
    flip_a_bit(path, "__0_0_0.distcp")
    status, text = run(str(tmp_path), "verify")
    assert status == 1 and "INVALID" in text and "__0_0_0.distcp was altered since rank 0 wrote it" in text
    status, text = run(str(path), "verify", "--shallow")
    assert status == 0 and "VALID" not in text and "COMPLETE" in text and "not the checksums" in text


def test_verify_of_a_folder_checks_all_of_it(job: Job, tmp_path: Path) -> None:
    """Newest first, a line each; a broken one is the folder's answer, and does not hide the others."""
    for step in (40, 41, 42):
        job.save(tmp_path, step)
    status, text = run("verify", str(tmp_path))
    assert status == 0 and re.findall(r"^VALID .*: step (\d+),", text, re.MULTILINE) == ["42", "41", "40"]
    assert text.endswith("3 checkpoints checked: none is broken\n")
    flip_a_bit(tmp_path / "iter_0000041")
    status, text = run("verify", str(tmp_path))
    assert status == 1 and re.findall(r"^(\w+) ", text, re.MULTILINE) == ["VALID", "INVALID", "VALID", "3"]
    assert text.endswith("3 checkpoints checked: 1 broken\n")
    logged = json.loads(run("verify", str(tmp_path), "--json")[1])
    assert [entry["valid"] for entry in logged["checkpoints"]] == [True, False, True] and logged["valid"] is False
    assert logged["error"] == logged["checkpoints"][1]["error"] and logged["folder"] == str(tmp_path)
    assert run("verify", str(tmp_path), "--shallow")[0] == 0


def test_verify_of_a_folder_shows_how_far_it_is(job: Job, tmp_path: Path) -> None:
    """On a terminal: which one, of how many."""
    for step in (41, 42):
        job.save(tmp_path, step)
    out = io.StringIO()
    verify(main.parser().parse_args(["verify", str(tmp_path)]), Console(file=out, width=200, force_terminal=True))
    assert "checking iter_0000042, 1 of 2" in out.getvalue() and "checking iter_0000041, 2 of 2" in out.getvalue()


def test_list_says_that_it_did_not_compare_the_sums(job: Job, tmp_path: Path) -> None:
    """What was not looked at is not called valid."""
    job.save(tmp_path, 41)
    assert "sums not checked" in run(str(tmp_path), "list")[1]


def test_nothing_is_cut_in_a_file_or_a_pipe(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that a script reads is whole, however long the folder's name and the reason are."""
    folder = tmp_path / ("a-long-name-" * 12)
    folder.mkdir()
    path = job.save(folder, 41)
    (path / "__0_0_0.distcp").unlink()
    main.main([str(folder), "list"])
    text = capsys.readouterr().out
    assert f"{path}/__0_0_0.distcp is missing; rank 0 wrote it" in text and "\u2026" not in text


def test_wrong_usage_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such path, no such command; an empty directory is 1."""
    assert run(str(tmp_path / "nowhere"), "verify")[0] == 2
    assert run(str(tmp_path), "verify")[0] == 1
    assert run(str(tmp_path), "list")[0] == 1
    with pytest.raises(SystemExit) as exited:
        main.main([str(tmp_path), "destroy"])
    assert exited.value.code == 2 and "invalid choice: 'destroy'" in capsys.readouterr().err


def test_the_command_stands_before_or_after_the_folder(job: Job, tmp_path: Path) -> None:
    """The older order means the same, wherever the options are."""
    path = str(job.save(tmp_path, 41))
    assert main.command_first(["--shallow", path, "verify", "--json"]) == ["verify", "--shallow", path, "--json"]
    assert main.command_first(["verify", path]) == ["verify", path]
    for words in ((path, "verify", "--shallow"), ("--shallow", path, "verify"), (path, "list"), (path, "inspect")):
        assert run(*words) == run(*main.command_first(words)) and run(*words)[0] == 0


def test_tables_have_lines_on_a_terminal_and_aligned_columns_in_a_pipe(job: Job, tmp_path: Path) -> None:
    """A column of the plain form begins at the same place in every line."""
    for step in (7, 41):
        job.save(tmp_path, step)
    assert "\u2502" in run("list", str(tmp_path), terminal=True)[1]
    text = run("list", str(tmp_path))[1]
    assert not re.search("[\u2500-\u257f]", text)
    head, *rows = (line for line in text.splitlines() if re.match(r" *(step|7|41) ", line))
    assert {row.index("exited") for row in rows} == {head.index("cause")} and len(rows) == 2
    assert all(line == line.rstrip() for line in text.splitlines())


def test_an_output_folder_means_the_checkpoints_in_it(job: Job, tmp_path: Path) -> None:
    """`ttp ckpt list output` and `ttp ckpt list output/checkpoints` are one."""
    job.save(tmp_path / "checkpoints", 41)
    for command in ("list", "inspect", "verify"):
        assert run(command, str(tmp_path)) == run(command, str(tmp_path / "checkpoints"))


def test_inspect_shows_who_wrote_what(job: Job, tmp_path: Path) -> None:
    """Every rank with its bytes and elements, which add up to all, and every tensor with its writers."""
    path = job.save(tmp_path, 42, holders=3)
    status, text = run("inspect", str(path), "--json")
    answer = json.loads(text)
    elements = {key: tensor.numel() for key, tensor in job.tensors.items()}
    assert (
        status == 0
        and answer["step"] == 42
        and answer["cause"]["text"] == "signal SIGKILL"
        and answer["layout"] == {"dp": 3}
    )
    assert answer["tensors"].keys() == elements.keys()
    assert {rank for tensor in answer["tensors"].values() for rank in tensor["ranks"]} == {0, 1, 2}
    rows = [line.split() for line in run("inspect", str(path))[1].splitlines() if re.match(r" +[012]  -", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert sum(int(row[6]) for row in rows) == sum(elements.values())
    assert sum(int(row[2]) for row in rows) == len(answer["files"])


def test_inspect_gives_each_part_of_a_large_layout_a_row(job: Job, tmp_path: Path) -> None:
    """The trainer's has a model and an optimizer in it."""
    job.save(tmp_path, 42, layout={"dp": 3, "model": {"layers": 2, "width": 8}, "kind": "even"})
    text = run("inspect", str(tmp_path))[1]
    assert re.search(r"^layout +dp 3, kind even", text, re.MULTILINE)
    assert re.search(r"^ +model +layers 2, width 8", text, re.MULTILINE)


def test_inspect_gives_each_number_of_a_step_a_line(job: Job, tmp_path: Path) -> None:
    """Of the commit record and of the host state: no Python of ours is read by people."""
    record = CommitRecord(42, 3.0, 0.5, False, 1024.0, (0.001, 2.5e-07), (5.25,))
    state = {
        "trainer": {"samples": 336, "place": {"epoch": 5}, "groups": [{"lr": 0.5}, {}]},
        "nothing": {},
        "optimizer": {"param_groups": []},
    }
    job.save(tmp_path, 42, record=record, state=state)
    text = run("inspect", str(tmp_path))[1]
    for line in (
        "commit record +of step 42",
        "  grad norm +3, clipped by the factor 0.5",
        "  loss scale +1024",
        "  learning rates +0.001, 2.5e-07",
        "  sums over ranks +5.25 .*the loss, as a rule.*",
        "host state",
        "  trainer +samples 336",
        "    place +epoch 5",
        "    groups 0 +lr 0.5",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    assert "CommitRecord" not in text and not re.search("nothing|groups 1", text)
    assert json.loads(run("inspect", str(tmp_path), "--json")[1])["record"]["sums"] == [5.25]


def test_inspect_shows_a_skipped_step_and_a_norm_that_was_not_taken(job: Job, tmp_path: Path) -> None:
    """Of an overflow, and of `barrier` mode."""
    job.save(tmp_path, 42, record=CommitRecord(42, 0.0, 1.0, False, 1.0, (0.001,), ()))
    text = run("inspect", str(tmp_path))[1]
    assert re.search(r"^  grad norm +not taken$", text, re.MULTILINE) and "sums" not in text
    job.save(tmp_path, 43, record=CommitRecord(43, float("inf"), 1.0, True, 1024.0, (0.001,), ()))
    text = run("inspect", str(tmp_path))[1]
    assert "of step 43, a skipped step: its gradients overflowed" in text
    assert re.search(r"^  grad norm +inf$", text, re.MULTILINE)


def test_inspect_shows_who_wrote_the_plain_values(job: Job, tmp_path: Path) -> None:
    """The rank that published, beside its own tensors."""
    job.save(tmp_path, 42, blobs={"group": 0.5})
    writers = [line for line in run("inspect", str(tmp_path))[1].splitlines() if "plain values" in line]
    assert len(writers) == 1 and writers[0].endswith("weights, plain values, metadata")


def test_inspect_of_a_damaged_one_shows_what_there_is_and_says_so(job: Job, tmp_path: Path) -> None:
    """The manifest is whole; what cannot be read of the files is named, and the status is 1."""
    path = job.save(tmp_path, 42)
    (path / "__1_0_0.distcp").unlink()
    status, text = run("inspect", str(path))
    assert (
        status == 1 and "signal SIGKILL" in text and "INVALID" in text and "__1_0_0.distcp is missing; rank 1" in text
    )


def test_inspect_calls_broken_what_list_does(job: Job, tmp_path: Path) -> None:
    """A file that no table of contents is read of."""
    path = job.save(tmp_path, 42)
    (path / ".metadata").unlink()
    status, text = run("inspect", str(path))
    assert status == 1 and "INVALID" in text and ".metadata is missing" in " ".join(text.split())


def test_list_names_what_else_takes_room(job: Job, tmp_path: Path) -> None:
    """Staging directories, half removed and broken ones, with what becomes of each."""
    path = job.save(tmp_path, 42)
    for name in (
        "iter_0000043_tmp_a",
        "iter_0000041_tmp_pruned_x",
        "iter_0000040_broken_1",
        "iter_0000039_superseded_1",
    ):
        shutil.copytree(path, tmp_path / name)
    text = run("list", str(tmp_path))[1]
    for name, meaning in (
        ("iter_0000043_tmp_a", "a staging directory"),
        ("iter_0000041_tmp_pruned_x", "half removed"),
        ("iter_0000040_broken_1", "renamed"),
        ("iter_0000039_superseded_1", "superseded by a later write"),
    ):
        assert re.search(rf"^{name} .*{meaning}", text, re.MULTILINE), text
    answer = json.loads(run("list", str(tmp_path), "--json")[1])
    assert [entry["step"] for entry in answer["checkpoints"]] == [42] and len(answer["leftovers"]) == 4
    assert all(entry["bytes"] > 0 for entry in answer["leftovers"])


def test_a_nodes_piece_is_judged_as_one_and_not_compared_or_pruned_alone(job: Job, tmp_path: Path) -> None:
    """What only all nodes together can tell is refused: which file is not here, which node has it, and what to do."""
    Cluster(tmp_path).save(job, 42)
    path = tmp_path / "a" / "iter_0000042"
    assert "part of a node" in run("list", str(tmp_path / "a"))[1]
    (listed,) = json.loads(run("list", str(tmp_path / "a"), "--json")[1])["checkpoints"]
    assert listed["bytes"] == sum(file.stat().st_size for file in path.iterdir()), "the other node's files are not here"
    text = run("inspect", str(path))[1]
    assert re.search(r"^ +3 +b ", text, re.MULTILINE) and "nodes          a, b" in text
    assert "one node's part: 3 of 5 files are here" in run("verify", str(path))[1]
    for words in (("diff", str(path), str(path)), ("export", str(path), str(tmp_path / "x"), "--to", "torch")):
        status, text = run(*words)
        assert (
            status == 3 and "one node's part of a checkpoint of 2 nodes: __2_0_0.distcp is not here (node b has" in text
        )
        assert "nor is 1 more; copy the *.distcp files of all nodes' parts" in text
    status, text = run("prune", str(tmp_path / "a"), "--keep", "1")
    assert status == 3 and "no step is whole in" in text and "name the folders of all nodes" in text


def test_pieces_that_were_copied_together_are_a_checkpoint(job: Job, tmp_path: Path) -> None:
    """Compared and exported like any other, without torch's index; a lost box is still found."""
    Cluster(tmp_path).save(job, 42)
    whole = job.save(tmp_path / "whole", 42, blobs={"group": 0.5})
    path = tmp_path / "a" / "iter_0000042"
    for file in (tmp_path / "b" / "iter_0000042").glob("*.distcp"):
        shutil.copy(file, path)
    assert not (path / ".metadata").exists() and "5 of 5 files are here" in run("verify", str(path))[1]
    assert run("diff", str(path), str(whole))[0] == 0
    assert run("export", str(path), str(tmp_path / "w"), "--to", "safetensors", "--all")[0] == 0
    status, text = run("prune", str(tmp_path / "a"), "--keep", "1")
    assert status == 0 and "nothing to remove" in text
    (path / "__3_0_0.distcp").unlink()
    status, text = run("diff", str(path), str(whole))
    assert status == 3 and "__3_0_0.distcp is not here (node b has it); copy" in text


def become_empty(path: Path) -> None:
    shutil.rmtree(path)


def become_foreign(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "weights.bin").write_bytes(b"x")


def become_stock(path: Path) -> None:
    (path / ".metadata").rename(path.parent / ".metadata")
    shutil.rmtree(path)


def take_another_worlds_files(path: Path) -> None:
    """Of the same step and the same model, saved by another number of ranks."""
    other = path.parent.parent / "other" / path.name
    for file in other.glob("*.distcp"):
        shutil.copy(file, path / file.name)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (become_empty, r"no checkpoint in .*: expected directories like iter_0000042; name the folder that was given"),
    (become_foreign, r"manifest\.json is missing: .* was never published, or was damaged"),
    (become_stock, r"it has \.metadata and no manifest\.json, so torch\.distributed\.checkpoint wrote it alone"),
    (take_another_worlds_files, r"__0_0_0\.distcp is longer than written: it has \d+ bytes, expected \d+"),
    (truncate, r"__1_0_0\.distcp is truncated: it has \d+ bytes, expected \d+"),
    (remove(DATA), r"__1_0_0\.distcp is missing; rank 1 wrote it"),
    (flip_a_bit, r"__1_0_0\.distcp was altered since rank 1 wrote it: checksum xxh3_128:\w+, expected xxh3_128:\w+"),
    (of_version(0), r"format_version: got 0, expected 1 or 2\. Read it with the ttp that wrote it"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=range(len(DAMAGE)))
def test_every_command_names_the_damage(job: Job, tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    """1 from those that judge, 3 from those that cannot do their work; in text and as JSON; nothing is written or removed."""
    folder = tmp_path / "folder"
    path = job.save(folder, 42, holders=3)
    job.save(tmp_path / "other", 42, holders=2)
    damage(path)
    before = sorted(str(file) for file in folder.rglob("*"))
    good, output = str(tmp_path / "other"), str(tmp_path / "out")
    for words, expected in (
        (("verify", str(folder)), Status.NO),
        (("diff", str(folder), good), Status.FAILED),
        (("diff", good, str(folder)), Status.FAILED),
        (("export", str(folder), output, "--to", "safetensors"), Status.FAILED),
        (("prune", str(folder), "--keep", "1", "--yes"), Status.FAILED),
    ):
        status, text = run(*words)
        assert status == expected and re.search(reason, text), (words, text)
        answer = json.loads(run(*words, "--json")[1])
        assert answer["status"] == expected and re.search(reason, answer["error"]), (words, answer)
    judged = run("list", str(folder))[0]
    assert judged == (Status.YES if damage is flip_a_bit else Status.NO)
    assert sorted(str(file) for file in folder.rglob("*")) == before and not Path(output).exists()


@pytest.mark.parametrize("words", [["list"], ["inspect"], ["verify"], ["diff", "{}"], ["export", "x", "--to", "torch"]])
def test_a_path_that_is_not_a_folder_is_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    """A file and nothing at all are distinguished."""
    (tmp_path / "file").write_text("x")
    for name, what in (("file", "is a file"), ("nothing", "is not there")):
        path = str(tmp_path / name)
        status, text = run(words[0], path, *(word.format(path) for word in words[1:]))
        assert status == 2 and f"{path} {what}: expected a checkpoint (iter_0000042) or a folder" in text


@pytest.fixture
def as_other_user(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Return a function that takes this process's right to read what belongs to root, until the test ends."""
    euid = os.geteuid()
    parents = [
        parent for parent in (tmp_path, *tmp_path.parents) if parent.stat().st_uid == euid and parent != Path("/")
    ]
    modes = [(parent, parent.stat().st_mode) for parent in parents]

    def drop() -> None:
        for parent, mode in modes:
            parent.chmod(mode | 0o055)
        if euid == 0:
            os.seteuid(65534)

    yield drop
    os.seteuid(euid)
    for parent, mode in modes:
        parent.chmod(mode)


def test_what_may_not_be_read_is_not_called_broken(job: Job, tmp_path: Path, as_other_user: Callable[[], None]) -> None:
    """3 and the file's name: neither valid nor invalid is known, and prune removes nothing."""
    older, path = job.save(tmp_path, 41), job.save(tmp_path, 42)
    path.chmod(0o755)
    (path / "manifest.json").chmod(0)
    as_other_user()
    for command in ("inspect", "verify"):
        status, text = run(command, str(path))
        assert status == 3 and f"{path}/manifest.json: Permission denied; have it read by who may" in text
        assert "INVALID" not in text
    status, text = run("list", str(tmp_path))
    assert status == 3 and "unreadable" in text and f"{path}/manifest.json: Permission denied" in text
    status, text = run("verify", str(tmp_path))
    assert status == 3 and "VALID" in text and "2 checkpoints checked: 1 unreadable" in text
    assert path.is_dir() and older.is_dir()


def test_a_folder_that_may_not_be_entered_is_named(job: Job, tmp_path: Path, as_other_user: Callable[[], None]) -> None:
    """Every command says so, and fails with 3."""
    folder = tmp_path / "closed"
    job.save(folder, 42)
    folder.chmod(0)
    as_other_user()
    for words in (["list"], ["inspect"], ["verify"], ["prune", "--keep", "1"], ["diff", str(folder)]):
        status, text = run(words[0], str(folder), *words[1:])
        assert status == 3 and str(folder) in text and "Permission denied" in text, (words, text)


def test_wrong_command_lines_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse names what was got and what was expected."""
    for words, reported in (
        ([], "the following arguments are required: COMMAND"),
        (["prune", "x"], "the following arguments are required: --keep"),
        (["prune", "x", "--keep", "0"], "got '0', expected an integer from 1"),
        (["export", "x", "y"], "the following arguments are required: --to"),
        (["export", "x", "y", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["diff", "x"], "the following arguments are required: B"),
    ):
        with pytest.raises(SystemExit) as exited:
            main.main(words)
        assert exited.value.code == 2 and reported in capsys.readouterr().err


def test_the_documented_exit_statuses_are_the_codes() -> None:
    """docs/checkpoints.md, `--help` and the code name the same numbers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    listed = [int(number) for number in re.findall(r"^\| (\d) \|", text, re.MULTILINE)]
    reported = [int(number) for number in re.findall(r"^  (\d)  ", main.parser().format_help(), re.MULTILINE)]
    assert listed == reported == [int(status) for status in Status]
