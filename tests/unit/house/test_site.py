"""The documentation is a site whose links all lead somewhere, and its first page fits on a screen or two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shown import ROOT

MOST_WORDS = 900


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make docs-site` runs. Not quiet: then mkdocs counts no warnings, and a strict build passes with broken links."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(folder / "mkdocs.yml"),
    ]
    return subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True, timeout=240, check=False)


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    """`make docs-site`: pages, anchors, linked source files, and the API from docstrings."""
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    for page in ("index", "quickstart", "settings", "decisions/0001-dependencies"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    assert "save_dirs" in (tmp_path / "site/api.html").read_text()
    assert (tmp_path / "site/source/examples/ddp/shortest.py.txt").is_file()


@pytest.mark.parametrize(
    "link", ["missing.md", "limits.md#no-such-heading", "../examples/no_such_file.py"]
)  # fmt: skip
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str) -> None:
    """A page, a heading, a source file."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Home\n\n[away]({link})\n")
    (docs / "limits.md").write_text("# Limits\n")
    config = (
        (ROOT / "mkdocs.yml").read_text().partition("nav:")[0].replace("docs/hooks.py", str(ROOT / "docs/hooks.py"))
    )
    validation = (ROOT / "mkdocs.yml").read_text().partition("\nvalidation:")[2]
    (tmp_path / "mkdocs.yml").write_text(f"{config}validation:{validation}")
    failed = build(tmp_path, tmp_path / "site")
    assert failed.returncode != 0 and link.rpartition("#")[2] in failed.stdout + failed.stderr


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")))
def test_a_page_begins_with_what_its_reader_can_do_afterwards(page: str) -> None:
    """In its first paragraphs; decisions are records, not pages to learn from."""
    opening = (ROOT / "docs" / page).read_text().split("\n## ")[0]
    assert page.startswith("decisions/") or "After this page you" in opening


def test_readme_is_short() -> None:
    """A reader sees on the first screens what it is, what it survives and where to go on."""
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS
