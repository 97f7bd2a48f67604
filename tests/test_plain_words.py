"""The documents are read once: sentences are short, README is one screen or two, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tree.documents import decisions_index, slug

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for path in (
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").rglob("*.md"),
    )
    if path.exists()
]
MOST_WORDS = 22
"""The mean length of a sentence on a page, at most."""
README_WORDS = 900
CHANGELOG_LINES = 60

FENCE = re.compile(r"\s*(```|~~~)")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
NO_PROSE = re.compile(r"\s*$|#|\s*\||\s*</?[a-z]|\s*!\[[^\]]*\]\([^)]*\)\s*$")
"""Empty lines, headings, rows of tables, HTML, and pictures."""
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SHORTENED = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|al|Fig|Eq)\. ")
SENTENCE_ENDS = re.compile(r"(?<!\b[A-Z])([.!?][)\"'*_]*)\s+(?=[\"'(*_`]*(?:[A-Z0-9]|edged\b))")


def blocks(text: str) -> list[str]:
    """Paragraphs and list items of a page, each on one line: what a reader reads, without its Markdown marks."""
    found: list[str] = []
    fenced = False
    goes_on = False
    for line in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).splitlines():
        if FENCE.match(line):
            fenced, goes_on = not fenced, False
        elif fenced or NO_PROSE.match(line) or (not goes_on and line.startswith("    ")):
            goes_on = False
        elif item := LIST_ITEM.match(line):
            found.append(line[item.end() :])
            goes_on = True
        elif goes_on:
            found[-1] += " " + line.strip().removeprefix("> ")
        else:
            found.append(line.strip().removeprefix("> "))
            goes_on = True
    return [LINK.sub(r"\1", block) for block in found if " · " not in block]


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose. A full stop within code ends none, and code may begin one."""
    found = []
    for block in blocks(text):
        codes: list[str] = []

        def name(match: re.Match[str], codes: list[str] = codes) -> str:
            codes.append(match[0])
            return f"`C{len(codes) - 1}`"

        plain = SHORTENED.sub(r"\1.", CODE.sub(name, block))
        for part in SENTENCE_ENDS.sub("\\1\n", plain).split("\n"):
            found.append(re.sub(r"`C(\d+)`", lambda match, codes=codes: codes[int(match[1])], part))
    return [sentence for sentence in found if words(sentence)]


def words(sentence: str) -> int:
    """How many words a sentence has: what stands between spaces and holds a letter or a digit."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings: one that stands there already gets a number."""
    found: set[str] = set()
    for title in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        plain = slug(LINK.sub(r"\1", title))
        number = next(n for n in range(99) if (f"{plain}-{n}" if n else plain) not in found)
        found.add(f"{plain}-{number}" if number else plain)
    return found


def test_what_is_counted_is_what_a_reader_reads() -> None:
    page = """# A title of five words here

        <p align="center">HTML</p>

    First `a.b. C d` here, see
    [the page](x.md#y). It has 0.5 of it, e.g. this. `code` begins this one. edged does, too.

    | a table | is none |

    - an item
      on two lines
    1. another. With two.

    ```
    code. Is none.
    ```
    """.replace("\n    ", "\n")
    assert sentences(page) == [
        "First `a.b. C d` here, see the page.",
        "It has 0.5 of it, e.g.this.",
        "`code` begins this one.",
        "edged does, too.",
        "an item on two lines",
        "another.",
        "With two.",
    ]
    assert words("It has 0.5 of - it.") == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_a_page_are_short(page: Path) -> None:
    found = sentences(page.read_text())
    mean = sum(map(words, found)) / max(len(found), 1)
    longest = "\n".join(f"{words(sentence)}: {sentence}" for sentence in sorted(found, key=words, reverse=True)[:10])
    assert mean <= MOST_WORDS, f"a sentence has {mean:.1f} words in the mean; the longest:\n{longest}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in slugs(path.read_text()), target


def test_readme_is_short_and_sends_nobody_to_raw_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= README_WORDS
    assert "docs/results" not in text
    commands = re.findall(r"^```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert commands[0].splitlines()[-1] == "./tools/quickstart", (
        "the first commands of README are those that show it working"
    )


def test_the_changelog_is_one_page() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= CHANGELOG_LINES


def test_every_page_of_results_is_named_by_their_index() -> None:
    folder = ROOT / "docs" / "results"
    index = (folder / "README.md").read_text()
    assert not [page.name for page in folder.glob("*.md") if f"({page.name})" not in index and page.name != "README.md"]


def test_the_index_of_decisions_is_their_headings() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    assert decisions_index(text) in text, "write it anew: python -m tests.tree.documents"
