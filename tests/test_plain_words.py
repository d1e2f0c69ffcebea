"""The documents are in plain English: no word that has to be learnt for this project, and short sentences.

`pytest -rP tests/test_plain_words.py` prints the length of sentences by page.
"""

from __future__ import annotations

import re
import runpy
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for pattern in ("*.md", "llms.txt", "examples/*.md", "docs/*.md") for path in sorted(ROOT.glob(pattern))]
MEDIAN, NINE_OF_TEN, LONGEST = 12, 22, 45  # words of a sentence; the longest is a list that one page needs
INSTEAD = {
    r"(un)?like machines": "machines of the same kind", r"second of (a|one) name": "a duplicate",
    r"no one loss": "no single loss", r"doors?": "API", r"rooms": "folders", r"raw": "uncompressed, fp32",
    r"beside": "next to, compared with, in addition to", r"told": "what says it, and to whom",
    r"as ever": "as usual", r"with a sentence": "with an error", r"the least(?! recently)": "the limit",
    r"deals?|dealt": "assign", r"births?": "incarnation", r"void|astray": "stale", r"(?<!go )past": "beyond, former",
    r"(take|takes|in|whose) turns?": "alternately", r"carriers?|bringers?": "uploader",
    r"begins? (again|anew)|anew": "again, from the start", r"in step": "at the same step", r"fed": "sent",
    r"blows?|meddles?": "fault", r"mends?|mended": "repair", r"complains?|complaints?": "report",
    r"hearing|reception": "what is received", r"that of|those of|those (that|which|who|whose)": "name the thing again",
    r"so (many|long|much)": "this number", r"who ?ever": "name the process", r"down": "to the workers",
    r"on (its|their) ways?": "under way, sent", r"what comes|what follows|what is left": "name the thing",
}  # fmt: skip
STARTS = ("Who", "Whoever", "What", "Whatever", "Which", "That it", "Whether", "Nobody", "Whose")  # but for questions


def prose(text: str) -> str:
    """Without code, addresses of links and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^([ \t]*)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    |\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]*`", "CODE", text)


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, points of lists, headings and cells of tables."""
    paragraph: list[str] = []
    for line in [*prose(text).splitlines(), ""]:
        line = line.strip()
        point = re.match(r"(?:[-*>]|#+|\d+\.)\s+", line)
        if not line or point or line.startswith("|"):
            yield " ".join(paragraph)
            paragraph = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|"))
        elif line.startswith("#"):
            yield line.lstrip("# ") + "?"  # a heading may ask
        elif line:
            paragraph.append(line[point.end() :] if point else line)


def sentences(text: str) -> Iterator[str]:
    for block in blocks(text):
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z*(\"])", block):
            if re.search(r"[a-z]", sentence):
                yield sentence


def lengths(text: str) -> list[int]:
    """Words of each sentence; titles and cells of one or two words do not count."""
    return [count for one in sentences(text) if (count := len(one.split())) > 2]


def private(text: str) -> list[str]:
    """Where a text has words that are not used, or sentences that begin with a riddle."""
    found = [
        f"{match[0]!r} ({better}): {sentence[:150]}"
        for sentence in sentences(text) for word, better in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{word})\b", sentence, re.IGNORECASE)
    ]  # fmt: skip
    found += [
        f"begins with {sentence.split()[0]}: {sentence[:150]}" for sentence in sentences(text)
        if sentence.strip("*(").startswith(tuple(f"{word} " for word in STARTS)) and not sentence.endswith("?")
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_word_has_to_be_learnt(page: Path) -> None:
    found = private(page.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", ["api", "commands"])
def test_the_generated_reference_has_none_either(page: str) -> None:
    reference = runpy.run_path(str(ROOT / "docs/write_reference.py"))
    text = "\n\n".join(part for part in reference[page]() if part)
    found = private(text)
    assert not found, "\n".join(found)
    assert "\\ " not in text  # "rallypoint[watch]", not "rallypoint\"


def test_sentences_are_short() -> None:
    by_page = {page: lengths(page.read_text()) for page in PAGES if page.stem != "index"}
    for page, counts in by_page.items():
        print(f"{page.stem:20} {statistics.median(counts):5.0f} {statistics.quantiles(counts, n=10)[8]:5.0f}")
    every = [count for counts in by_page.values() for count in counts]
    nine_of_ten = statistics.quantiles(every, n=10)[8]
    print(f"{'all':20} {statistics.median(every):5.0f} {nine_of_ten:5.0f}")
    assert statistics.median(every) <= MEDIAN
    assert nine_of_ten <= NINE_OF_TEN
    long = [sentence for page in PAGES for sentence in sentences(page.read_text()) if len(sentence.split()) > LONGEST]
    assert not long, "\n".join(long)
