"""For `make docs`: what lies outside of docs/ is no part of the site, so its name stands there
without a link. On a checkout's own pages the links work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.resolve()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take links that lead out of docs/ out of a page; called by MkDocs."""
    folder = (DOCS / page.file.src_path).parent

    def checked(match: re.Match[str]) -> str:
        target = (folder / match[2].partition("#")[0]).resolve()
        inside = target.is_relative_to(DOCS) and target.suffix
        return match[0] if inside else f"`{match[1]}`" if "`" not in match[1] else match[1]

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|mailto:|#)([^)\s]+)\)", checked, markdown)
