"""The passages that a question is most likely about, found in the documents themselves and not by the model."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from kvchat.documents import Document
from kvchat.quotes import Passage

Reread = Literal["auto", "always", "never"]
"""When the passages of a question go before it: after an answer that fails, at once, or not at all."""
BUDGET = 600
"""Characters of all passages together, some 150 tokens: about what stays exact in the window while an answer begins."""
SHORT = 120
"""Characters up to which a sentence or line is shown with its neighbours."""

_WORD = re.compile(r"\w+(?:[-._/:@'\u2019]\w+)*")
_PART = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"[.!?][\"')\]\u2019\u201d]*\s+(?=[\"'(\[\u2018\u201c]*[A-Z0-9])")
_WRAPPED = 45
"""Characters from which a line that ends within a sentence is taken to go on in the next one."""


class Finder:
    """Ranks the sentences and lines of some documents by BM25 (Robertson; Lucene's variant, by bm25s)."""

    def __init__(self, documents: Sequence[Document]):
        self._documents = documents

    @cached_property
    def _units(self) -> list[tuple[Document, int, int]]:
        return [(d, start, end) for d in self._documents for start, end in units(d.text)]

    @cached_property
    def _index(self) -> object:
        import bm25s  # with numpy, which a first answer need not wait for

        index = bm25s.BM25()
        index.index([_words(d.text[start:end]) for d, start, end in self._units], show_progress=False)
        return index

    def find(self, question: str) -> list[Passage]:
        """The best passages, the best one last, next to the question; none where no word of it is in the documents."""
        words = _words(question)
        if not self._units or not words:
            return []
        index: object = self._index
        scores = index.get_scores(words)  # type: ignore[attr-defined]
        found: list[range] = []  # of units
        room = BUDGET
        for best in scores.argsort(kind="stable")[::-1][:20].tolist():
            if scores[best] <= 0:
                break
            if any(best in taken for taken in found):
                continue
            around = self._widened(best, found)
            size = self._units[around[-1]][2] - self._units[around[0]][1]
            if size <= room or not found:
                found.append(around)
                room -= size
        return [self._passage(units) for units in reversed(found)]

    def _widened(self, unit: int, taken: Sequence[range]) -> range:
        """A short sentence or line with the next one and the one before, where these aren't taken."""
        document, start, end = self._units[unit]
        around = range(unit, unit + 1)
        for other in (unit + 1, unit - 1):
            free = 0 <= other < len(self._units) and not any(other in units for units in taken)
            if free and self._units[other][0] is document and end - start < SHORT:
                around = range(min(other, around.start), max(other + 1, around.stop))
                start, end = min(start, self._units[other][1]), max(end, self._units[other][2])
        return around

    def _passage(self, units: range) -> Passage:
        document, start, _ = self._units[units[0]]
        end = self._units[units[-1]][2]
        where = str(document.locate(start))
        paged = document.spans and document.spans[0].page is not None
        if paged and len(self._documents) > 1:
            where = f"{document.name}, {where}"
        return Passage(document, start, end, where)


def units(text: str) -> list[tuple[int, int]]:
    """[start, end) of the sentences and lines of a text: prose that is wrapped is joined, and divided into sentences."""
    found = []
    start = offset = 0
    lines = text.split("\n")
    for i, line in enumerate(lines):
        end = offset + len(line)
        follows = lines[i + 1] if i + 1 < len(lines) else ""
        goes_on = len(line) >= _WRAPPED and line[-1] not in ".!?:;{}" and follows[:1].strip()
        offset = end + 1
        if goes_on:
            continue
        for stop in [*(m.end() for m in _SENTENCE_END.finditer(text, start, end)), end]:
            piece = text[start:stop]
            if _PART.search(piece):
                lead = len(piece) - len(piece.lstrip())
                found.append((start + lead, start + len(piece.rstrip())))
            start = stop
        start = offset
    return found


def _words(text: str) -> list[str]:
    """In lower case: identifiers and numbers whole, and their parts."""
    words = []
    for whole in _WORD.findall(text.lower()):
        words.append(whole)
        parts = _PART.findall(whole)
        words += parts if parts != [whole] else []
    return words
