"""Hooks of the documentation site: README.md is its home, and other links lead to pages or to the repository."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# The address of the repository, such as https://github.com/OWNER/lintx. Without it, these links are plain text.
REPOSITORY = os.environ.get("REPOSITORY")

# The page of the Python interface is made from the docstrings. Only the site has it.
PYTHON = """# Python interface

::: linformer_cli.api

## Mechanisms

::: linformer_cli.attention.base.Attention
    options: {heading_level: 3, show_root_heading: true}

::: linformer_cli.attention.base.AttentionShape
    options: {heading_level: 3, show_root_heading: true}

::: linformer_cli.attention.base.Memory
    options: {heading_level: 3, show_root_heading: true}
"""

# `lintx demo --build` writes the page beside the site, where mkdocs does not look for it.
DEMO = '\n<p><a href="../../demo/">Open the page with the model mnist-deep</a></p>\n'


def on_files(files: Files, config: Any) -> None:
    home = re.sub(r"\]\((?!https?:)", "](../", (ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=home))
    files.append(File.generated(config, "reference/python.md", content=PYTHON))


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, which are relative to its place in the repository."""
    if page.file.src_uri == "guide/demo.md":
        text = text.replace("\n", f"\n{DEMO}\n", 1)
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        label, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        name = "index.md" if path == "README.md" else posixpath.relpath(path, "docs")
        if path.startswith("docs/") or path == "README.md":
            return f"[{label}]({posixpath.relpath(name, folder or '.')}{anchor or ''})"
        return f"[{label}]({REPOSITORY}/blob/main/{path}{anchor or ''})" if REPOSITORY else label

    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", rewrite, text)
