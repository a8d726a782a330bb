"""The passage of a text that is most like a quote which is not in it word for word."""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, islice

from kvchat.quotes.key import Key

LONG = 12
"""Letters and digits from which on a quote says enough to be recognized with some of its words changed."""

_WORD = re.compile(r"\d+|[^\W\d_]+")
_DIGIT = r"[\d\xb2\xb3\xb9\xbc-\xbe\u2070-\u2089\u2150-\u218b]"
_NUMBER = re.compile(rf"(?:(?<!\w)-)?{_DIGIT}+(?:[.,:/]{_DIGIT}+)*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MOST_PLACES = 50
_MOST_LETTERS = 400  # of two pieces that are compared letter by letter


@dataclass(frozen=True)
class Like:
    """A passage of the source, [start, end). `likeness` is the share of its and the quote's letters that are alike in the same
    order, `same` whether all letters and digits are, but for case."""

    start: int = 0
    end: int = 0
    likeness: float = 0.0
    same: bool = False


class Words:
    """A text as its words and numbers, without regard to case and to what stands between them."""

    def __init__(self, key: Key):
        self._key = key
        self._spans = [match.span() for match in _WORD.finditer(key.text)]
        self.words = [key.text[start:end].casefold() for start, end in self._spans]
        self.letters = "".join(self.words)
        self._starts = list(
            accumulate(map(len, self.words), initial=0)
        )  # of each word in the letters, and the end
        self._spaced = f" {' '.join(self.words)} "

    def nearest(self, quote: "Words") -> Like:
        """Where the quote's letters stand, divided into words however; or what is around the longest run of its words that is in
        this text, wherever that is most like the quote."""
        if not quote.words:
            return Like()
        if found := self._same_letters(quote.letters):
            return self._like(*found, 1.0, True)
        start, stop = self._longest_run(quote.words)
        if start == stop:
            return Like()
        places = islice(self._places(quote.words[start:stop]), _MOST_PLACES)
        its = Counter(quote.words)
        windows = [self._window(len(quote.words), place - start) for place in places]
        low, high = max(windows, key=lambda window: (its & Counter(self.words[slice(*window)])).total())
        blocks = SequenceMatcher(
            None, quote.words, self.words[low:high], autojunk=False
        ).get_matching_blocks()
        head, tail = blocks[0], blocks[-2]  # the last one is empty
        # words of the quote before and after those stand for as many of the text
        first = max(low, low + head.b - head.a)
        last = min(high, low + tail.b + len(quote.words) - tail.a)
        return self._like(first, last, _likeness(quote.words, self.words[first:last]), False)

    def _like(self, first: int, last: int, likeness: float, same: bool) -> Like:
        start, end = self._key.source(self._spans[first][0], self._spans[last - 1][1])
        return Like(start, end, likeness, same)

    def _same_letters(self, letters: str) -> tuple[int, int] | None:
        """[first, last) of the words that hold these letters; few letters must be whole words."""
        at = self.letters.find(letters)
        while at >= 0:
            end = at + len(letters)
            first, last = bisect_right(self._starts, at) - 1, bisect_left(self._starts, end)
            if len(letters) >= LONG or (self._starts[first], self._starts[last]) == (at, end):
                return first, last
            at = self.letters.find(letters, at + 1)
        return None

    def _longest_run(self, words: list[str]) -> tuple[int, int]:
        """[start, stop) of the longest run, in letters, of these words that is in the text; the first of equals."""
        best, start = (0, 0, 0), 0
        for stop in range(1, len(words) + 1):
            while start < stop and f" {' '.join(words[start:stop])} " not in self._spaced:
                start += 1
            letters = sum(map(len, words[start:stop]))
            if letters > best[0]:
                best = letters, start, stop
        return best[1:]

    def _places(self, run: list[str]) -> Iterator[int]:
        """The index of the first word wherever the run stands."""
        needle = f" {' '.join(run)} "
        at = self._spaced.find(needle)
        while at >= 0:
            yield self._spaced.count(" ", 0, at)  # as many words stand before as spaces
            at = self._spaced.find(needle, at + 1)

    def _window(self, size: int, begin: int) -> tuple[int, int]:
        """[low, high) of the words in which a quote of `size` words may stand whose first one is near `begin`."""
        slack = 2 + size // 5
        return max(0, begin - slack), min(len(self.words), begin + size + slack)


def _likeness(a: list[str], b: list[str]) -> float:
    """The share of the letters of both that are alike in the same order: those of equal words, and some of words between."""
    alike = 0
    for kind, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        mine, other = "".join(a[i:j]), "".join(b[k:m])
        if kind == "equal":
            alike += len(mine)
        elif len(mine) + len(other) < _MOST_LETTERS:
            between = SequenceMatcher(None, mine, other, autojunk=False).get_matching_blocks()
            alike += sum(block.size for block in between)
    return 2 * alike / sum(map(len, [*a, *b]))


def same_numbers(a: str, b: str) -> bool:
    """Whether two texts have the same numbers in the same order; 1,200 is 1200."""
    return _numbers(a) == _numbers(b)


def _numbers(text: str) -> list[str]:
    return [_THOUSANDS.sub("", number) for number in _NUMBER.findall(Key(text).text)]
