"""The passage of a text that is most like a quote which is not in it word for word."""

import re
from bisect import bisect_right
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
    order, `same` whether all are but for case."""

    start: int = 0
    end: int = 0
    likeness: float = 0.0
    same: bool = False


class Words:
    """A text as its words and numbers without regard to case and to what stands between them."""

    def __init__(self, key: Key):
        self._key = key
        self._spans = [match.span() for match in _WORD.finditer(key.text)]
        self.words = [key.text[start:end].casefold() for start, end in self._spans]
        self.joined = f" {' '.join(self.words)} "
        self._starts = list(
            accumulate((len(word) + 1 for word in self.words), initial=0)
        )  # of the spaces before

    @property
    def letters(self) -> int:
        return sum(map(len, self.words))

    def nearest(self, quote: "Words") -> Like:
        """What is around the longest run of the quote's words that is in this text, wherever that is most like the quote."""
        start, stop = self._longest_run(quote.words)
        if start == stop:
            return Like()
        places = islice(self._places(quote.words[start:stop]), _MOST_PLACES)
        windows = [self._window(quote.words, place - start) for place in places]
        alike, first, last = max(windows, key=lambda window: window[0])
        mine, its = self.words[first:last], quote.words
        likeness = SequenceMatcher(None, " ".join(mine), " ".join(its), autojunk=False).ratio()
        begin, end = self._key.source(self._spans[first][0], self._spans[last - 1][1])
        return Like(begin, end, likeness, "".join(mine) == "".join(its))

    def _longest_run(self, words: list[str]) -> tuple[int, int]:
        """[start, stop) of the longest run, in letters, of these words that is in the text; the first of equals."""
        best, start = (0, 0, 0), 0
        for stop in range(1, len(words) + 1):
            while start < stop and f" {' '.join(words[start:stop])} " not in self.joined:
                start += 1
            letters = sum(map(len, words[start:stop]))
            if letters > best[0]:
                best = letters, start, stop
        return best[1:]

    def _places(self, run: list[str]) -> Iterator[int]:
        """The index of the first word wherever the run stands."""
        needle = f" {' '.join(run)} "
        at = self.joined.find(needle)
        while at >= 0:
            yield bisect_right(self._starts, at) - 1
            at = self.joined.find(needle, at + 1)

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
