"""What people see at the terminal, and the exit status that scripts use."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from ttp.checkpoint import cli
from ttp.checkpoint.answer import size_text

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    status = cli.main(arguments, Console(file=out, width=300))
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


def test_inspect_shows_all_there_is(job: Job, tmp_path: Path) -> None:
    """Of the newest, or of the one named; square brackets are shown as they are."""
    path = job.save(tmp_path, 42)
    for argument in (tmp_path, path):
        status, text = run(str(argument), "inspect")
        assert status == 0
        for shown in (
            "signal SIGKILL",
            "'samples': 336",
            "__2_0_0.distcp",
            "model.embed",
            "[13, 6]",
            "bfloat16",
            "1024.0",
        ):
            assert shown in text, shown


def test_verify_names_the_damage(job: Job, tmp_path: Path) -> None:
    """A flipped bit is found by checksums and, as promised, not by --shallow."""
    path = job.save(tmp_path, 42)
    assert run(str(path), "verify") == (0, run(str(path), "verify")[1]) and "VALID" in run(str(path), "verify")[1]
    file = path / "__0_0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, text = run(str(tmp_path), "verify")
    assert status == 1 and "INVALID" in text and "__0_0_0.distcp was altered since rank 0 wrote it" in text
    status, text = run(str(path), "verify", "--shallow")
    assert status == 0 and "VALID" not in text and "COMPLETE" in text and "not the checksums" in text


def test_list_says_that_it_did_not_compare_the_sums(job: Job, tmp_path: Path) -> None:
    job.save(tmp_path, 41)
    assert "sums not checked" in run(str(tmp_path), "list")[1]


def test_nothing_is_cut_in_a_file_or_a_pipe(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that a script reads is whole, however long the folder's name and the reason are."""
    folder = tmp_path / ("a-long-name-" * 12)
    folder.mkdir()
    path = job.save(folder, 41)
    (path / "__0_0_0.distcp").unlink()
    cli.main([str(folder), "list"])
    text = capsys.readouterr().out
    assert f"{path}/__0_0_0.distcp is missing; rank 0 wrote it" in text and "\u2026" not in text


def test_wrong_usage_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such path, no such command; an empty directory is 1."""
    assert run(str(tmp_path / "nowhere"), "verify")[0] == 2
    assert run(str(tmp_path), "verify")[0] == 1
    assert run(str(tmp_path), "list")[0] == 1
    with pytest.raises(SystemExit) as exited:
        cli.main([str(tmp_path), "destroy"])
    assert exited.value.code == 2 and "invalid choice: 'destroy'" in capsys.readouterr().err


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    """Binary units."""
    assert size_text(nbytes) == text
