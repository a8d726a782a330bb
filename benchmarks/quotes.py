"""True and falsified quotes: how many true ones verify at the right page or line, and whether a falsified one ever does.

    python benchmarks/quotes.py [--count 200] [--seed 0] [--verbose] [PDF or text ...]

Passages of 6 to 40 words are taken at random from the sample documents and the given ones, in equal parts from one line, over
a line's end, over a hyphen at a line's end, over a page's end (without the headers and footers there) and with an fi or fl. They
are written as a model may write them: white space as one space, a hyphen at a line's end with a space, without one or not at
all, typographic quotation marks, dashes and ligatures or plain ones. A false one has one digit or one word changed. A passage
that is in the documents more than once, whose false form is in them, or that holds an unreadable character isn't used. One JSON line follows.
"""

import argparse
import json
import random
import re
import time
from bisect import bisect_left
from collections import Counter
from functools import cache
from pathlib import Path

from kvchat.documents import Document, read_now
from kvchat.quotes import VERIFIED, Checker
from kvchat.quotes.pages import furniture

SAMPLES = Path(__file__).parent.parent / "sample_docs"
PAGE_END = "page end"
MARKS = {"one line": r"\w", "line end": r"[a-z,]\n[a-z]", "hyphen": r"[a-z]-\n[a-z]", "ligature": "fi|fl"}
TRIES = 3000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every quote that fails, or should have")
    options = parser.parse_args()
    samples = [SAMPLES / "harbour-handbook.pdf", SAMPLES / "observatory-logbook.md", SAMPLES / "tidegauge"]
    documents = read_now([*samples, *options.paths]).documents
    kinds = [kind for kind, mark in MARKS.items() if any(places(d, mark) for d in documents)] + [PAGE_END]
    draw = random.Random(options.seed)
    started = time.perf_counter()
    checker = Checker(documents)
    checker.check("> nothing of the kind stands anywhere")
    built = time.perf_counter() - started

    true, right, deceived, seconds = Counter[str](), Counter[str](), 0, 0.0
    while true.total() < options.count:
        kind = kinds[true.total() % len(kinds)]
        document, start, end, quote = passage(draw, documents, kind)
        lie = falsified(draw, quote)
        times = int(bare(quote) == bare(document.text[start:end]))  # 0 where a page's header stands in it
        if lie is None or once(quote, documents) != times or once(lie, documents):
            continue
        started = time.perf_counter()
        [check, *_], lies = checker.check(f"> {quote}"), checker.check(f"> {lie}")
        seconds += time.perf_counter() - started
        true[kind] += 1
        place = check.passage and check.outcome == VERIFIED and check.passage.first == document.locate(start)
        right[kind] += bool(place)
        deceived += lies[0].outcome == VERIFIED
        if options.verbose and (not place or lies[0].outcome == VERIFIED):
            print(
                f"{kind}, {document.locate(start)}: {quote!r}\n    {check.outcome}: {check.passage and check.passage.where} {check.passage and check.passage.text!r}"
            )
    characters = sum(len(document.text) for document in documents)
    print(
        f"{len(documents)} documents, {characters:,} characters, first look-up {built:.2f} s, then {1000 * seconds / 2 / true.total():.1f} ms"
    )
    for kind in kinds:
        print(f"{kind:10} {right[kind]:4} of {true[kind]} true quotes verified at the right place")
    print(
        f"{'all':10} {right.total():4} of {true.total()}; {deceived} of {true.total()} false quotes verified"
    )
    print(
        json.dumps(
            {
                "true": true.total(),
                "right": right.total(),
                "deceived": deceived,
                "characters": characters,
            }
        )
    )


def passage(
    draw: random.Random, documents: tuple[Document, ...], kind: str
) -> tuple[Document, int, int, str]:
    """A random passage of the kind, where it stands, and as a model might quote it."""
    for _ in range(TRIES):
        document = draw.choice([d for d in documents if kind != PAGE_END or len(d.spans) > 1])
        text, size = document.text, draw.randint(6, 40)
        if kind == PAGE_END:
            span = draw.choice(document.spans[:-1])
            words = body(document)
            middle = bisect_left(words, (span.end, 0))
            first = max(0, middle - draw.randint(3, size - 3))
        else:
            found, words = places(document, MARKS[kind]), words_of(document)
            if not found:
                continue
            first = max(0, bisect_left(words, (draw.choice(found) + 1, 0)) - 1 - draw.randint(0, size - 3))
        chosen = words[first : first + size]
        if kind == "one line":
            chosen = [w for w in chosen if "\n" not in text[chosen[0][0] : w[1]]]
        if len(chosen) < 4:
            continue
        start, end = chosen[0][0], chosen[-1][1]
        whole = text[start:end]
        if "\ufffd" in whole:
            continue
        pieces = [text[a:b] for a, b in chosen] if kind == PAGE_END else whole.split()
        quote = written(draw, "\n".join(pieces) if kind == PAGE_END else whole)
        if document.locate(start) and (
            kind != PAGE_END or document.locate(start) != document.locate(end - 1)
        ):
            return document, start, end, quote
    raise SystemExit(f"no passage of the kind {kind!r} in these documents")


@cache
def words_of(document: Document) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", document.text)]


@cache
def places(document: Document, pattern: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, document.text)]


@cache
def body(document: Document) -> list[tuple[int, int]]:
    """The words that are in no header or footer."""
    cut = furniture(document)
    return [(a, b) for a, b in words_of(document) if not any(start <= a < end for start, end in cut)]


def written(draw: random.Random, text: str) -> str:
    hyphen = draw.choice(["-", "- ", ""])
    text = re.sub(r"(?<=[a-z])-\s+(?=[a-z])", hyphen, text)
    if draw.random() < 0.5:
        text = text.translate(str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--"))
    if draw.random() < 0.3:
        text = text.replace("fi", "\ufb01").replace("fl", "\ufb02")
    return " ".join(text.split())


def falsified(draw: random.Random, quote: str) -> str | None:
    """The quote with one digit changed where it has one, or one word replaced by another of its words."""
    digits = [m.start() for m in re.finditer(r"\d", quote)]
    if digits and draw.random() < 0.8:
        at = draw.choice(digits)
        return quote[:at] + draw.choice("0123456789".replace(quote[at], "")) + quote[at + 1 :]
    words = [m.span() for m in re.finditer(r"[^\W\d_]+", quote)]
    if len({quote[a:b] for a, b in words}) < 2:
        return None
    start, end = draw.choice(words)
    others = sorted({quote[a:b] for a, b in words} - {quote[start:end]})
    return quote[:start] + draw.choice(others) + quote[end:]


def once(quote: str, documents: tuple[Document, ...]) -> int:
    """How often the quote's letters and digits stand in the documents, whatever is between them."""
    return sum(bare(document.text).count(bare(quote)) for document in documents)


@cache
def bare(text: str) -> str:
    return re.sub(r"[\W_]", "", text.replace("\ufb01", "fi").replace("\ufb02", "fl"))


if __name__ == "__main__":
    main()
