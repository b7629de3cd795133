"""The source distribution, built as a package index gets it: everything that a checkout has, and what says who may use it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOT_IN_IT = {".gitignore"}
"""Only a repository needs these."""

if not (ROOT / ".git").exists():
    pytest.skip("this is a source distribution already", allow_module_level=True)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build one from the files that are in the repository or would be added, and from nothing else that lies about."""
    copy, built = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = built.iterdir()
    return archive


def tracked() -> list[str]:
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).exists()]


def test_it_has_every_file_of_a_checkout(distribution: Path) -> None:
    """Folders that are links in a checkout (`ttp/controller`) are folders here."""
    with tarfile.open(distribution) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert not set(tracked()) - inside - NOT_IN_IT


def test_it_says_whose_it_is_and_who_may_use_it(distribution: Path) -> None:
    with tarfile.open(distribution) as archive:
        (name,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        member = archive.extractfile(name)
        assert member is not None
        said = Parser().parsestr(member.read().decode())
    assert (said["Author"], said["License-Expression"]) == ("The TTP authors", "Apache-2.0")
    assert set(said.get_all("Provides-Extra") or ()) == {
        "plots", "transformers", "accelerate", "lightning", "megatron", "s3", "tensorboard", "dev",
    }  # fmt: skip
    assert "Home-page" not in said and "Project-URL" not in said
