"""What reading gives: documents and the places in them, what was skipped, and progress."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The characters [start, end) of a document's text.

    A text file is one span with `line` = 1. A PDF has one span for each page that was read, in
    reading order (an empty page has start == end): `page` counts from 1, `label` is the page's
    name in a viewer, None when it has none.
    """

    start: int
    end: int
    line: int | None = None
    page: int | None = None
    label: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a character stands: `file.py:12`, `p. 12` or `p. 12 (PDF page 20)`.

    Labels repeat within real books and differ from the page's index in most of them, so both are
    shown unless they are equal.
    """

    name: str
    line: int | None = None
    page: int | None = None
    label: str | None = None

    def __str__(self) -> str:
        if self.page is None:
            return self.name if self.line is None else f"{self.name}:{self.line}"
        if not self.label:
            return f"PDF page {self.page}"
        if self.label == str(self.page):
            return f"p. {self.label}"
        return f"p. {self.label} (PDF page {self.page})"


@dataclass(frozen=True)
class Document:
    """One file's text. `name` is fit for display and unique within a Reading; `spans` are in order
    and cover the text but for the newline that parts two pages; `notes` are one-line warnings, the
    most serious first."""

    name: str
    text: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()

    def locate(self, offset: int) -> Place:
        """The place of the character at `offset`, 0 <= offset <= len(text); the newline after a
        page, and the end of the text, belong to what stands before them. Raises IndexError."""
        if not 0 <= offset <= len(self.text):
            raise IndexError(f"offset {offset} is outside of a text of {len(self.text)} characters")
        index = bisect_right(self.spans, offset, key=lambda span: span.start) - 1
        while index > 0 and self.spans[index].start == self.spans[index].end:
            index -= 1
        span = self.spans[max(index, 0)]
        line = None if span.line is None else span.line + self.text.count("\n", span.start, offset)
        return Place(self.name, line, span.page, span.label)


@dataclass(frozen=True)
class Skipped:
    """A file that was not read (or, with a final slash, a folder) and why: `binary`, `empty`..."""

    name: str
    reason: str


@dataclass(frozen=True)
class Reading:
    """All that a read gave: documents in the order asked for, and what a folder held besides."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Step:
    """Progress: `done` of `total` pages of the document `name`, or files after `name` was read."""

    name: str
    done: int
    total: int
    unit: str
