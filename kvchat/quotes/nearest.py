"""The passage of a text that is most like a quote which is not in it word for word."""

import re
from bisect import bisect_left, bisect_right
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
        windows = [self._window(quote.words, place - start) for place in places]
        _, first, last = max(windows, key=lambda window: window[0])
        mine, its = " ".join(self.words[first:last]), " ".join(quote.words)
        return self._like(first, last, SequenceMatcher(None, mine, its, autojunk=False).ratio(), False)

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

    def _window(self, quote: list[str], begin: int) -> tuple[int, int, int]:
        """How many words are alike when the quote is laid at `begin`, and [first, last) of the passage in its place."""
        slack = 2 + len(quote) // 5
        low = max(0, begin - slack)
        window = self.words[low : max(0, begin + len(quote) + slack)]
        blocks = SequenceMatcher(None, quote, window, autojunk=False).get_matching_blocks()[:-1]
        first, last = blocks[0], blocks[-1]
        # words of the quote beyond those that are alike stand for as many of the text
        left = low + max(0, first.b - first.a)
        right = low + min(len(window), last.b + last.size + len(quote) - last.a - last.size)
        return sum(block.size for block in blocks), left, right


def same_numbers(a: str, b: str) -> bool:
    """Whether two texts have the same numbers in the same order; 1,200 is 1200."""
    return _numbers(a) == _numbers(b)


def _numbers(text: str) -> list[str]:
    return [_THOUSANDS.sub("", number) for number in _NUMBER.findall(Key(text).text)]
