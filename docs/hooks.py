"""Links from a page to a source file of the repository work in the site: a linked file is copied there, as plain text.

Owns the rewriting of such links. Never accepts one whose file is missing: the build fails (`make docs-site`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each link out of the documentation folder. Raises PluginError for a missing file."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def copied(found: re.Match[str]) -> str:
        name = os.path.normpath(folder / found[1])
        if name.startswith("docs/"):
            return found[0]
        path = ROOT / name
        if not path.exists():
            raise PluginError(
                f"invalid link in docs/{page.file.src_uri}: got {found[1]}, expected a file or folder of the repository. Correct the link."
            )
        if path.is_dir():
            listed = sorted(file.name for file in path.iterdir())
            content = f"{name}/\n" + "\n".join(listed) + "\n"
            file = File.generated(config, f"source/{name}/folder.txt", content=content)
        else:
            file = File.generated(config, f"source/{name}.txt", content=path.read_text(encoding="utf-8"))
        if files.get_file_from_path(file.src_uri) is None:
            files.append(file)
        return f"]({os.path.relpath(file.src_uri, PurePosixPath(page.file.src_uri).parent)})"

    return _OUTSIDE.sub(copied, markdown)
