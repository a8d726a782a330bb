"""Headers and footers: the lines that a PDF's text has in the middle of a sentence which runs on over the page's end."""

import re
from collections import Counter

from kvchat.documents import Document

_DIGITS = re.compile(r"\d+")
_MOST = 2  # lines at each end of a page
_OFTEN = 3  # pages that show the same line, digits aside


def furniture(document: Document) -> list[tuple[int, int]]:
    """The characters [start, end) of headers and footers, in order: first or last lines of a page that hold its label as
    first or last word, or that several pages have, digits aside."""
    text = document.text
    pages = [span for span in document.spans if span.page is not None]
    edges = [(_lines(text, span.start, span.end), span.label or str(span.page)) for span in pages]
    times = Counter(
        shape
        for lines, _ in edges
        for shape in {_shape(text, *line) for line in (*lines[:_MOST], *lines[-_MOST:])}
    )

    def is_furniture(start: int, end: int, label: str) -> bool:
        words = text[start:end].split()
        return label in (words[0], words[-1]) or times[_shape(text, start, end)] >= _OFTEN

    found: set[tuple[int, int]] = set()
    for lines, label in edges:
        for edge in (lines[:_MOST], lines[: -_MOST - 1 : -1]):
            for line in edge:
                if not is_furniture(*line, label):
                    break
                found.add(line)
    return sorted(found)


def _lines(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Where each line of text[start:end] that is not blank starts and ends."""
    return [
        (match.start(), match.end()) for match in re.compile(r"[^\n]*[^\s][^\n]*").finditer(text, start, end)
    ]


def _shape(text: str, start: int, end: int) -> str:
    return _DIGITS.sub("#", text[start:end].strip())
