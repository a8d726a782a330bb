"""A text folded for comparison, with the way back to the characters that it came from.

What is folded is typography, never a letter or a digit: dashes, quotation marks, white space and line ends, ligatures, soft
hyphens, hyphens at line ends, and composed against decomposed accents (NFC). NFKC would make 10² read 102.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Edit = tuple[int, int, str]
"""Characters [start, end) are replaced by a text."""

# Scripts without spaces between words: a word may start or end anywhere, and a line end parts nothing.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

_ONE_TO_ONE = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d", "-"),
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\u2032\u2039\u203a", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\xab\xbb", '"'),
        **dict.fromkeys("\t\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", " "),
        **dict.fromkeys(map(chr, range(0x2000, 0x200B)), " "),
    }
)
_SPELLED = {
    **dict(
        zip(
            "\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06",
            ["ff", "fi", "fl", "ffi", "ffl", "st", "st"],
            strict=True,
        )
    ),
    "\u2026": "...",
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
}
_FOLDED = re.compile(rf"(-\s*)|(\xad[^\S\n]*\n?)|(\s*\n\s*| {{2,}})|([{''.join(_SPELLED)}])")
_LETTER = re.compile(r"[^\W\d_]")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_BEYOND_ASCII = re.compile(r".?[^\x00-\x7f]+", re.DOTALL)


class Edited:
    """A text after edits, which are in order and do not overlap."""

    def __init__(self, text: str, edits: Iterable[Edit]):
        pieces: list[str] = []
        # offsets in this text, and in the one before, between which both run alike or an edit stands
        self._here, self._there = [0], [0]
        done = length = 0
        for start, end, new in edits:
            pieces += text[done:start], new
            length += start - done
            if len(new) != end - start:
                self._here += length, length + len(new)
                self._there += start, end
            length += len(new)
            done = end
        pieces.append(text[done:])
        self.text = "".join(pieces)
        self._here.append(len(self.text))
        self._there.append(len(text))

    def start(self, offset: int) -> int:
        """Where the character at `offset` begins in the text before the edits, or the edited piece that it is in."""
        return self._before(bisect_right(self._here, offset) - 1, offset, at_end=False)

    def end(self, offset: int) -> int:
        """Where the character before `offset` (not 0) ends in the text before the edits, or the edited piece that it is in."""
        return self._before(bisect_left(self._here, offset) - 1, offset, at_end=True)

    def _before(self, i: int, offset: int, at_end: bool) -> int:
        """What `offset`, in the stretch after mark i, was before."""
        here, there = self._here[i], self._there[i]
        if self._here[i + 1] - here != self._there[i + 1] - there:
            return self._there[i + 1] if at_end else there
        return there + offset - here


class Key:
    """The folded form of `text`, which may leave out the pieces `without`.

    Hyphens between letters are not in it: `hard` and `soft` hold the offsets before which one was, soft where white space
    followed it (op-/posite is opposite, state-of-/the-art is not). They are compared apart.
    """

    def __init__(self, text: str, without: Iterable[Edit] = ()):
        kept = Edited(text, without)
        composed = Edited(kept.text, _compose(kept.text))
        level = composed.text.translate(_ONE_TO_ONE)
        self.hard: list[int] = []
        self.soft: list[int] = []
        folded = Edited(level, self._fold(level))
        self._stages = (folded, composed, kept)
        self.text = folded.text

    def source(self, start: int, end: int) -> tuple[int, int]:
        """The characters of the source that [start, end), which is not empty, came from."""
        for stage in self._stages:
            start, end = stage.start(start), stage.end(end)
        return start, end

    def occurrences(self, part: "Key") -> Iterator[tuple[int, int]]:
        """Characters [start, end) of the source, wherever `part` stands in this key with the same hyphens."""
        size = len(part.text)
        at = self.text.find(part.text) if size else -1
        while at >= 0:
            if self._hyphened_as(part, at):
                yield self.source(at, at + size)
            at = self.text.find(part.text, at + 1)

    def _hyphened_as(self, part: "Key", at: int) -> bool:
        end = at + len(part.text)
        hard, soft = _between(self.hard, at, end), _between(self.soft, at, end)
        return set(part.hard) <= hard | soft and hard <= {*part.hard, *part.soft}

    def _fold(self, text: str) -> Iterator[Edit]:
        shorter = 0  # by so much is what has been folded shorter than it was
        for match in _FOLDED.finditer(text):
            start, end = match.span()
            new = self._folded(match, text[start - 1 : start], text[end : end + 1], start - shorter)
            shorter += end - start - len(new)
            yield start, end, new

    def _folded(self, match: re.Match[str], before: str, after: str, offset: int) -> str:
        hyphen, discretionary, white, other = match.groups()
        if discretionary and before.isalpha() and after.islower():
            return ""
        if hyphen := hyphen or discretionary:
            if _LETTER.match(before) and _LETTER.match(after):
                (self.soft if len(hyphen) > 1 else self.hard).append(offset)
                return ""
            return "-" if before.isalnum() and after.isalnum() else "- "[: len(hyphen)]
        if white:
            return "" if _UNSPACED.match(before) and _UNSPACED.match(after) else " "
        return _SPELLED[other]


def _between(offsets: list[int], start: int, end: int) -> set[int]:
    """Offsets inside of (start, end), counted from `start`."""
    return {offset - start for offset in offsets[bisect_right(offsets, start) : bisect_left(offsets, end)]}


def _compose(text: str) -> Iterator[Edit]:
    if unicodedata.is_normalized("NFC", text):
        return
    for match in _BEYOND_ASCII.finditer(text):
        run = match[0]
        if unicodedata.is_normalized("NFC", run):
            continue
        start = 0
        for i in range(1, len(run) + 1):
            # a character that composes with none before it starts the next edit
            if i == len(run) or (
                not unicodedata.combining(run[i])
                and _nfc(run[start : i + 1]) == _nfc(run[start:i]) + _nfc(run[i])
            ):
                if (new := _nfc(run[start:i])) != run[start:i]:
                    yield match.start() + start, match.start() + i, new
                start = i


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
