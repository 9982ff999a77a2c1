"""Makes the site's pages that are written elsewhere: READMEs beside the code, and references from it.

Every page keeps the links that work in the repository; on the site they lead to the page that the
same file became. What is no page (a module, a notebook) is shown as its path.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402 - beside this file, which is loaded by its path

_LINK = re.compile(
    r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)"
)

_MOVED = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "privtune/accounting/README.md": "accounting.md",
    "privtune/ledger/README.md": "ledger.md",
    "studies/README.md": "studies/index.md",
}


def pages() -> dict[str, str]:
    """Return the page of every file that becomes one, by its path in the repository."""
    found = dict(_MOVED)
    for path in sorted(ROOT.glob("privtune/**/README.md")):
        name = path.relative_to(ROOT).as_posix()
        room = "-".join(path.parent.relative_to(ROOT / "privtune").parts)
        found.setdefault(name, f"rooms/{room}.md")
    for path in sorted(ROOT.glob("studies/**/README.md")):
        name = path.relative_to(ROOT).as_posix()
        found.setdefault(name, path.parent.relative_to(ROOT).as_posix() + ".md")
    for path in sorted(ROOT.glob("docs/**/*.md")):
        found[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    return found


def relinked(text: str, source: str, page: str, known: dict[str, str]) -> str:
    """Return a file's text with its links as they must be on the site.

    Args:
        text: Markdown.
        source: The file's path in the repository.
        page: The page that it becomes.
        known: The page of every file, by path.

    Raises:
        ValueError: If a link leads nowhere.
    """

    def linked(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / there).exists():
            raise ValueError(f"{source}: {target} leads nowhere")
        if (ROOT / there).is_dir() and f"{there}/README.md" in known:
            there = f"{there}/README.md"
        place = known.get(there)
        if place is None and (there.startswith("docs/") or picture):
            place = there.removeprefix("docs/")
        if place is None or there.startswith("docs/examples/"):
            return f"{words} (`{there}`)"
        return f"{picture}[{words}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor or ''})"

    return "".join(
        part if number % 2 else _LINK.sub(linked, part)
        for number, part in enumerate(re.split(r"(```.*?```)", text, flags=re.DOTALL))
    )


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in ``docs/``."""
    known = pages()
    for source, page in known.items():
        if not source.startswith("docs/"):
            text = relinked((ROOT / source).read_text("utf-8"), source, page, known)
            files.append(File.generated(config, page, content=text))
    for picture in sorted(ROOT.glob("studies/**/*.png")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    rooms = "\n".join(
        f"- [{source.removesuffix('/README.md')}]({posixpath.relpath(page, 'rooms')})"
        for source, page in known.items()
        if source.startswith("privtune/")
    )
    files.append(File.generated(config, "rooms/index.md", content=f"# The packages\n\n{rooms}\n"))
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Relink the pages that do lie in ``docs/``."""
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri, pages())
