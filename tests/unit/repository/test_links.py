"""Links between the pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[3]
PAGES = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs give a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
            path = (page.parent / target).resolve() if target else page
            if "://" in target or target.startswith("mailto:"):
                continue
            if not path.exists() or (
                anchor and path.suffix == ".md" and anchor not in _anchors(path)
            ):
                broken.append(f"{page.relative_to(REPO)}: {target}#{anchor}")
    assert broken == []
