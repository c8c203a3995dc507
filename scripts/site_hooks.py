"""What the site does beside mkdocs and its theme: files outside ``docs/`` that a page links, and two languages.

Pages link files of the repository, an example or a study, as they do for a reader of the checkout. The site is complete by
itself, without the address of a repository: every such file gets a page below ``repository/`` that shows it, and a directory
a page that lists it. Pages ``NAME.zh.md`` are the Chinese of ``NAME.md``: they lie below ``zh/``, and the theme speaks Chinese
on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SHOWN = Path("repository")  # below it lie the pages of files outside docs/
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
OTHER_LANGUAGE = re.compile(r"\A\[(?:中文|English)\]\([^)]*\)\n+")
BETWEEN_CHINESE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n *(?=[\u3000-\u9fff\uff00-\uffef])")
LANGUAGES = {"en": "English", "zh": "中文"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
MOST_BYTES = 1_000_000  # of a file that is shown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` that pages link, and those that they link; move Chinese pages below ``zh/``."""
    pages = [file for file in files if file.is_documentation_page()]
    waiting = [target for file in pages for target in _outside(Path("docs") / file.src_uri, file.content_string)]
    added: set[Path] = set()
    while waiting:
        target = waiting.pop()
        if target in added:
            continue
        added.add(target)
        text = _page_of(target)
        files.append(File.generated(config, _shown(target).as_posix(), content=text))
        waiting += _outside(target / "x" if (ROOT / target).is_dir() else target, text)
    for file in pages:
        if file.src_uri.endswith(".zh.md"):
            english = files.get_file_from_path(file.src_uri.replace(".zh.md", ".md"))
            file.dest_uri = f"zh/{english.dest_uri}"
            file.__dict__.pop("url", None)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside ``docs/`` to their pages; drop the link to the other language, which the theme has."""
    source = Path(page.file.src_uri)
    if source.name in ("index.md", "index.zh.md") and source.parent == Path():
        page.meta["hide"] = ["navigation"]  # of the landing pages: the tabs are enough
    here = _repository_path(source)
    if here is None:
        return markdown
    parts = _prose_and_code(OTHER_LANGUAGE.sub("", markdown))
    if source.name.endswith(".zh.md"):  # HTML would show the end of a line as a space
        parts = ((text if is_code else BETWEEN_CHINESE.sub("", text), is_code) for text, is_code in parts)
    return "".join(text if is_code else _relinked(text, source, here) for text, is_code in parts)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Give the theme the language of the page, and the address of the same page in the other."""
    uri = page.file.src_uri
    config.theme["language"] = "zh" if uri.endswith(".zh.md") else "en"
    twins = {"en": uri.replace(".zh.md", ".md"), "zh": uri.replace(".zh.md", ".md").replace(".md", ".zh.md")}
    there = {language: _address(nav, twin) for language, twin in twins.items()}
    homes = {"en": "", "zh": "zh/"}
    config.extra["alternate"] = [
        {"name": name, "lang": language, "link": there[language] or homes[language] or "."}
        for language, name in LANGUAGES.items()
    ]
    return context


def _address(nav: Navigation, uri: str) -> str:
    """Return the address of a page below the site, empty where there is none."""
    return next((page.url for page in nav.pages if page.file.src_uri == uri), "")


def _prose_and_code(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a page, and whether each is a fenced block."""
    end = 0
    for found in FENCE.finditer(markdown):
        yield markdown[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield markdown[end:], False


def _links(source: Path, markdown: str) -> Iterator[Path]:
    """Yield what a file of the repository links, as paths below the repository."""
    for text, is_code in _prose_and_code(markdown):
        for found in [] if is_code else LINK.finditer(text):
            yield Path(os.path.normpath(source.parent / found[1]))


def _outside(source: Path, markdown: str) -> list[Path]:
    """Return what a file of the repository links that the site has no page or picture of."""
    linked = [path for path in _links(source, markdown) if path.parts[0] not in ("docs", "..")]
    return [path for path in linked if (ROOT / path).exists()]


def _relinked(text: str, source: Path, here: Path) -> str:
    """Return prose of a page with its links outside ``docs/`` led to pages of the site."""

    def to_page(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(here.parent / found[1]))
        if not (ROOT / target).exists() or target.parts[0] == "..":
            return found[0]  # mkdocs reports it
        if target.parts[0] != "docs":
            shown = _shown(target)
        elif here.parts[0] != "docs" or (ROOT / target).is_dir():
            shown = target.relative_to("docs") / ("index.md" if (ROOT / target).is_dir() else "")
        else:
            return found[0]
        return f"]({Path(os.path.relpath(shown, source.parent)).as_posix()}{found[2] or ''})"

    return LINK.sub(to_page, text)


def _repository_path(source: Path) -> Path | None:
    """Return the file of the repository that a page is made from; None for one that only lists or shows."""
    if source.parts[0] != SHOWN.name:
        return Path("docs") / source
    target = source.relative_to(SHOWN)
    if (ROOT / target).is_file():
        return target if target.suffix == ".md" else None
    return target if target.name == "index.md" else None


def _shown(target: Path) -> Path:
    """Return where the site shows a file or a directory of the repository."""
    if (ROOT / target).is_dir():
        return SHOWN / target / "index.md"
    return SHOWN / (target if target.suffix == ".md" else target.with_name(f"{target.name}.md"))


def _page_of(target: Path) -> str:
    """Return the text of the page that shows a file or lists a directory of the repository."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file() and child.name[0] != ".")
        return f"{HIDDEN}# {target.as_posix()}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if path.stat().st_size > MOST_BYTES:
        return f"{HIDDEN}# {target.as_posix()}\n\nThe file has {path.stat().st_size:,} bytes; it is in the checkout.\n"
    text = path.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return HIDDEN + text
    if target.suffix == ".ipynb":
        return HIDDEN + "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"]) + "\n"
    return f"{HIDDEN}# {target.as_posix()}\n\n````{_language(path)}\n{text}\n````\n"


def _cell(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook: prose as it is, code as a block."""
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def _language(path: Path) -> str:
    """Return the name that the highlighter has for the language of a file."""
    return {".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}.get(path.suffix, "text")
