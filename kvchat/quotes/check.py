"""Looks up in the documents what an answer claims: verified, repaired or not in the document."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvchat.documents import Document, Place
from kvchat.errors import QuoteFailed
from kvchat.quotes.claims import QUOTE, STRING, Claim, claims
from kvchat.quotes.key import UNSPACED, Key
from kvchat.quotes.nearest import LONG, Words, same_numbers
from kvchat.quotes.pages import furniture

VERIFIED, REPAIRED, MISSING = "verified", "repaired", "not in the document"

ENOUGH = 0.85
"""Of the letters and digits of a quote and of a passage, so much must be alike for the passage to repair it."""
NEAR = 0.6
"""And so much for it to be shown beside what is not in the document."""

_REPLACED = "\ufffd"
_CUT = re.compile(r"(?<=[^\W\d_])[-\u2010\u2011\xad]\Z")  # a quote that ends where a line does: adminis-
_MOST_GLUED = 40
_LETTER = re.compile(rf"[^\W{UNSPACED}]")
_GLUED_BEFORE = re.compile(rf"[^\W_{UNSPACED}][_\xad\u200b-\u200d\u2060]*\Z")
_GLUED_AFTER = re.compile(rf"[_\xad\u200b-\u200d\u2060]*[^\W_{UNSPACED}]")
_NUMBER_BEFORE = re.compile(r"(?:\d[.,:]|(?:\A|[^\w)])[-+\u2212])\Z")
_NUMBER_AFTER = re.compile(r"[.,:]\d")


@dataclass(frozen=True)
class Passage:
    """The characters [start, end) of a document's text, and where they stand: `book.txt:12-14`, `p. 12 (PDF page 20)`."""

    document: Document
    start: int
    end: int
    where: str

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.end]

    @property
    def first(self) -> Place:
        return self.document.locate(self.start)

    @property
    def last(self) -> Place:
        return self.document.locate(self.end - 1)


@dataclass(frozen=True)
class Check:
    """What became of a claim. `passage` is where it stands (the first of `occurrences`), the source's own words where it is
    repaired, the nearest ones (or None) where it is not in the document."""

    text: str
    kind: str
    outcome: str
    passage: Passage | None = None
    occurrences: int = 0

    def report(self) -> dict[str, Any]:
        """For `--json`. `source` is the passage as the document has it, `start` and `end` its characters in the text."""
        passage = self.passage
        found = passage and {
            "where": passage.where,
            "document": passage.document.name,
            "line": passage.first.line,
            "page": passage.first.page,
            "label": passage.first.label,
            "start": passage.start,
            "end": passage.end,
            "source": passage.text,
        }
        return {
            "text": self.text,
            "kind": self.kind,
            "outcome": self.outcome,
            "occurrences": self.occurrences,
            "passage": found,
        }


def require_verified(checks: Sequence[Check]) -> None:
    """Raises QuoteFailed unless all are."""
    failed = sum(check.outcome != VERIFIED for check in checks)
    if failed:
        raise QuoteFailed(
            f"{failed} of {len(checks)} quotes, numbers and names are not in the document as the answer has them; "
            "see the list of them, and ask again or leave out --strict"
        )


class Checker:
    """Checks answers about some documents. What it needs to know of their texts it finds out once, at the first answer."""

    def __init__(self, documents: Sequence[Document]):
        self._sources = [_Source(document) for document in documents]

    def check(self, answer: str) -> list[Check]:
        """The checks of everything that the answer quotes, names or counts; quotes first, nothing twice.

        Verified is what stands in a document as it is, or but for typography (see `Key`), as whole words, numbers and
        identifiers, also across a page's end and the headers there. Repaired is what differs in more than that from a passage
        which has the same numbers in the same order: a quote of 12 letters or more of which ENOUGH is alike, anything else
        where its letters and digits are the same. The rest is not in the document.
        """
        found: dict[str, Check] = {}
        for claim in claims(answer) if self._sources else ():
            for check in self._check(
                claim, [c.passage for c in found.values() if c.passage and c.outcome != MISSING]
            ):
                found.setdefault(check.text, check)
        return list(found.values())

    def _check(self, claim: Claim, near: Sequence[Passage]) -> list[Check]:
        """near: passages in which a claim is looked for before all others."""
        check = self._verify(claim, near)
        if check is not None:
            return [check]
        if claim.later is not None and any(s.has_word(claim.text.split()[0].lower()) for s in self._sources):
            return self._check(claim.later, near)
        if claim.parts:
            return [check for part in claim.parts for check in self._check(part, near)]
        return [self._repair(claim)]

    def _verify(self, claim: Claim, near: Sequence[Passage]) -> Check | None:
        if _REPLACED in claim.text:
            return None  # it may have been any character
        key = Key(_CUT.sub("", claim.text.strip()))
        found = [(s, *span) for s in self._sources for span in s.occurrences(key)]
        if not found and claim.kind in (QUOTE, STRING):
            found = [(s, *span) for s in self._sources for span in s.occurrences_between_pages(key)]
        if not found:
            return None

        def rank(place: tuple["_Source", int, int]) -> tuple[bool, bool]:
            source, start, end = place
            inside = any(p.document is source.document and p.start <= start and end <= p.end for p in near)
            return not inside, source.document.text[start:end] != claim.text

        best = min(found, key=rank)  # the first of equals
        return Check(claim.text, claim.kind, VERIFIED, self._passage(*best), len(found))

    def _repair(self, claim: Claim) -> Check:
        words = Words(Key(claim.text))
        likes = [(source.words.nearest(words), source) for source in self._sources]
        like, source = max(likes, key=lambda pair: pair[0].likeness)
        if like.likeness < NEAR:
            return Check(claim.text, claim.kind, MISSING)
        text, start, end = source.document.text, like.start, like.end
        alone = _stands_alone(text, start, end)
        if not alone:  # the 200 of 1,200: all of it is shown
            start, end = _widened(text, start, end)
        passage = self._passage(source, start, end)
        long = claim.kind in (QUOTE, STRING) and len(words.letters) >= LONG
        alike = like.likeness >= ENOUGH if long else like.same and alone
        repairs = alike and _REPLACED not in claim.text and same_numbers(claim.text, passage.text)
        return Check(claim.text, claim.kind, REPAIRED if repairs else MISSING, passage)

    def _passage(self, source: "_Source", start: int, end: int) -> Passage:
        document = source.document
        first, last = document.locate(start), document.locate(end - 1)
        if first.page is None:
            where = str(first) if first == last else f"{first}-{last.line}"
        else:
            where = str(first) if first == last else f"{first} to {last}"
            where = f"{document.name}, {where}" if len(self._sources) > 1 else where
        return Passage(document, start, end, where)


class _Source:
    """A document and what is made of its text for looking things up, when it is first needed."""

    def __init__(self, document: Document):
        self.document = document

    @cached_property
    def _key(self) -> Key:
        return Key(self.document.text)

    @cached_property
    def _key_between_pages(self) -> Key | None:
        """Without the headers and footers that stand in the middle of what runs on over a page's end."""
        between = furniture(self.document)
        return Key(self.document.text, ((start, end, "") for start, end in between)) if between else None

    @cached_property
    def words(self) -> Words:
        return Words(self._key)

    def has_word(self, word: str) -> bool:
        return any(True for _ in self.occurrences(Key(word)))

    def occurrences(self, key: Key) -> Iterator[tuple[int, int]]:
        return self._whole(self._key.occurrences(key))

    def occurrences_between_pages(self, key: Key) -> Iterator[tuple[int, int]]:
        return self._whole(self._key_between_pages.occurrences(key) if self._key_between_pages else ())

    def _whole(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        return (span for span in spans if _stands_alone(self.document.text, *span))


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether no word, number or accented letter goes on beyond [start, end): 12 is in neither 1200 nor 12.5 nor -12."""
    before, after = text[max(0, start - 4) : start], text[end : end + 4]
    first, last = text[start], text[end - 1]
    if after and unicodedata.combining(after[0]):
        return False
    if _LETTER.match(first) and _GLUED_BEFORE.search(before):
        return False
    if _LETTER.match(last) and _GLUED_AFTER.match(after):
        return False
    return not (
        (first.isdigit() and _NUMBER_BEFORE.search(before)) or (last.isdigit() and _NUMBER_AFTER.match(after))
    )


def _widened(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) up to the white space around it, within reason."""
    before, after = text[max(0, start - _MOST_GLUED) : start], text[end : end + _MOST_GLUED]
    beyond = re.split(r"\s", before)[-1], re.split(r"\s", after)[0]
    return start - len(beyond[0]), end + len(beyond[1])
