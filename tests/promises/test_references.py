"""What the pages and comments refer to is there: a page's section, a file, a result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLACES = ("README.md", "docs", "tiermem", "swap", "tests", "benchmarks", "tools")


def sources(ending: str) -> Iterator[Path]:
    """Pages and code of the repository; not the results, which say what was true on their day."""
    for place in PLACES:
        found = [ROOT / place] if place.endswith(ending) else (ROOT / place).rglob(f"*{ending}")
        yield from (path for path in found if path.parent != RESULTS)


PAGES = sorted(sources(".md"))


def beside(path: Path, name: str) -> list[Path]:
    """What `name` may mean in the file `path`."""
    folders = (path.parent, ROOT, ROOT / "tiermem", ROOT / "tests", ROOT / "benchmarks")
    return [folder / name for folder in folders if (folder / name).exists()]


def titles(page: Path) -> list[str]:
    """Of its sections, and of the paragraphs that begin with one."""
    text = page.read_text(encoding="utf-8")
    return [" ".join("".join(each).split()) for each in re.findall(r"^#+ (.+)$|\*\*([^*]+)\*\*", text, re.MULTILINE)]


def test_sections_that_are_referred_to_exist() -> None:
    found, missing = 0, []
    for path in (*PAGES, *sources(".py")):
        text = re.sub(r"\n\s*# ", "\n", path.read_text(encoding="utf-8"))  # a comment of several lines
        for name, title in re.findall(r"([\w/.]+\.md)`?,\s+\"([^\"]+)\"", text):
            found += 1
            wanted, pages = " ".join(title.split()), beside(path, name)
            if not any(each.startswith(wanted) for page in pages for each in titles(page)):
                missing.append(f'{path.relative_to(ROOT)}: {name}, "{wanted}"')
    assert not missing
    assert found > 20


def test_files_that_pages_name_exist() -> None:
    found, missing = 0, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for span in (*re.findall(r"`([^`\n]+)`", text), *re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)):
            where = f"{page.relative_to(ROOT)}: {span}"
            if re.fullmatch(r"[\w/.-]+/[\w.-]+\.(md|py|png)", span):
                found += 1
                missing += [] if beside(page, span) else [where]
            result = re.fullmatch(r"(?:benchmarks/)?results/([\w*.-]+)", span)
            if result is not None and not any(RESULTS.glob(result[1].rstrip("*") + "*")):
                missing.append(where)
    assert not missing
    assert found > 20
