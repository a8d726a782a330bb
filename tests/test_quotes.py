"""Quotes looked up: an honest one passes over any line end, hyphen or page; one changed digit or word never does."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdfs import lines, pdf

from kvchat.documents import Document, Span, read_now
from kvchat.errors import QuoteFailed
from kvchat.quotes import MISSING, REPAIRED, VERIFIED, Check, Checker, require_verified
from kvchat.quotes.claims import claims
from kvchat.quotes.key import Edited, Key
from kvchat.quotes.pages import furniture

SAMPLES = Path(__file__).parents[1] / "sample_docs"
LOG = """The tower at Hollin Fell is 55 metres high and was built in 1871.
It has 1,200 steps, a lift for 12 persons, and a -5 degree cellar; 3.9 tons of coal lie there.
The keeper is Priya Ansell. The key DH-0609-K opens gate_seven() and the well-known store.
The gate must not be opened before the harbour master has signed.
"""


def text_file(text: str, name: str = "log.txt") -> Document:
    return Document(name, text, (Span(0, len(text), line=1),))


def paged(*pages: str) -> Document:
    """A PDF's text as the reader joins it, with labels i, ii, iii."""
    spans, start = [], 0
    for number, page in enumerate(pages, 1):
        spans.append(Span(start, start + len(page), page=number, label="i" * number))
        start += len(page) + 1
    return Document("book.pdf", "\n".join(pages), tuple(spans))


def one(answer: str, *documents: Document) -> Check:
    checks = Checker(documents or [text_file(LOG)]).check(answer)
    assert len(checks) == 1, checks
    return checks[0]


def outcome(quote: str, text: str = LOG) -> str:
    return one(f"> {quote}", text_file(text)).outcome


@pytest.fixture(scope="module")
def samples() -> tuple[Document, ...]:
    return read_now([SAMPLES / "harbour-handbook.pdf", SAMPLES / "observatory-logbook.md"]).documents


# --- the key and its way back -------------------------------------------------------------------------------

SAME = [
    ("a – b — c ‐ d − e", "a - b - c - d - e"),
    ("‘one’ “two” „three‟ «four»", "'one' \"two\" \"three\" \"four\""),
    ("eﬃcient ﬁeld ﬂow", "efficient field flow"),
    ("tab\tand\u00a0no-break\u2009thin  two\n lines", "tab and no-break thin two lines"),
    ("cafe\u0301 A\u030angstrom", "café Ångstrom"),
    ("\u1112\u1161\u11ab\u1100\u1173\u11af", "한글"),
    ("co\u00adoper\u00ad\nate", "cooperate"),
    ("some\u00adTitle", "some-Title"),
    ("op-\nposite", "opposite"),
    ("op-\nposite", "op-posite"),
    ("op-\nposite", "op- posite"),
    ("state-of-\nthe-art", "state-of-the-art"),
    ("F-\n13", "F-13"),
    ("F\u00ad13", "F-13"),
    ("zero\u200bwidth", "zerowidth"),
    ("wait…", "wait..."),
    ("一行目\nの続き", "一行目の続き"),
]  # fmt: skip
DIFFERENT = [
    ("10²", "102"),
    ("well-known", "wellknown"),
    ("re-sign it", "resign it"),
    ("F-13", "F13"),
    ("F-\n13", "F13"),
    ("The Gate", "the gate"),
    ("two words", "twowords"),
    ("3.9", "39"),
    ("½ cup", "1/2 cup"),
    ("Ⅳ", "IV"),
    ("e", "é"),
    ("cafe\u0301", "cafe"),
    ("a, b", "a b"),
    ("cafe\u0301² here", "café2 here"),
    ("state-of-\nthe-art", "state of the art"),
]


@pytest.mark.parametrize(("source", "quote"), SAME)
def test_typography_is_no_difference(source: str, quote: str) -> None:
    text = f"It is said: {source} is here."
    check = one(f'> "{quote}"' if '"' not in quote else f"> {quote}", text_file(text))
    assert check.outcome == VERIFIED
    assert check.passage is not None
    assert check.passage.text == source


@pytest.mark.parametrize(("source", "quote"), DIFFERENT)
@pytest.mark.parametrize("turned", [False, True])
def test_letters_and_digits_are(source: str, quote: str, turned: bool) -> None:
    if turned:
        source, quote = quote, source.replace("\n", " ")
    assert outcome(quote, f"It is said: {source} is here.") != VERIFIED


@given(st.text(alphabet="aé\u0301-\u00ad\n \tﬁ—“’.1…\u200bあ\u1112\u1161\u11ab", max_size=40))
@settings(deadline=None)
def test_every_offset_leads_back(text: str) -> None:
    key = Key(text)
    spans = [key.source(i, i + 1) for i in range(len(key.text))]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert spans == sorted(spans)
    for (start, end), character in zip(spans, key.text, strict=True):
        if character.isalnum() and end - start == 1 and text[start].isalnum() and text[start] not in "ﬁé":
            assert text[start] == character


def test_edits_map_both_ways() -> None:
    edited = Edited("abcdef", [(1, 2, ""), (3, 4, "XYZ"), (4, 6, "W")])
    assert edited.text == "acXYZW"
    assert [edited.start(i) for i in range(6)] == [0, 2, 3, 3, 3, 4]
    assert [edited.end(i) for i in range(1, 7)] == [1, 3, 4, 4, 4, 6]


# --- verified -----------------------------------------------------------------------------------------------


def test_a_quote_has_its_line() -> None:
    check = one("> The keeper is Priya Ansell.")
    assert (check.kind, check.outcome, check.occurrences) == ("quote", VERIFIED, 1)
    assert check.passage is not None
    assert check.passage.where == "log.txt:3"
    assert check.passage.text == "The keeper is Priya Ansell."
    over = one("> in 1871. It has 1,200 steps")
    assert over.outcome == VERIFIED
    assert over.passage is not None
    assert over.passage.where == "log.txt:1-2"


def test_a_quote_may_be_divided_into_lines() -> None:
    assert one("> The keeper\n> is Priya\n> Ansell.").outcome == VERIFIED
    two = Checker([text_file(LOG)]).check(
        "> The keeper is Priya Ansell.\n> and was built in 1871.\n\nSo it is."
    )
    assert [(c.text, c.outcome) for c in two] == [
        ("The keeper is Priya Ansell.", VERIFIED),
        ("and was built in 1871.", VERIFIED),
    ]


def test_over_a_page_and_its_headers() -> None:
    words = ("tower", "cellar", "lift", "store")
    pages = [
        f"BOOK OF GATES {i}\nThe {word} begins and the {word} goes\n{'i' * i}"
        for i, word in enumerate(words, 1)
    ]
    book = paged(*pages)
    assert [book.text[a:b] for a, b in furniture(book)][:3] == ["BOOK OF GATES 1", "i", "BOOK OF GATES 2"]
    check = one("> the tower goes The cellar begins", book)
    assert check.outcome == VERIFIED
    assert check.passage is not None
    assert check.passage.where == "p. i (PDF page 1) to p. ii (PDF page 2)"
    assert one("> the tower goes i BOOK OF GATES 2 The cellar begins", book).outcome == VERIFIED
    assert one("> the tower goes The lift begins and the lift", book).outcome != VERIFIED, (
        "two halves of different pages"
    )


def test_a_hyphen_over_a_page(tmp_path: Path) -> None:
    file = tmp_path / "hyphen.pdf"
    file.write_bytes(pdf(lines(b"On the first page it is op-"), lines(b"posite and ends.")))
    [document] = read_now([file]).documents
    check = one("> On the first page it is opposite and ends.", document)
    assert check.outcome == VERIFIED
    assert check.passage is not None
    assert check.passage.where == "p. 1 to p. 2"
    assert one("> On the first page it is opposites and ends.", document).outcome != VERIFIED


def test_a_quote_may_end_with_a_line() -> None:
    text = "She performs system adminis-\ntration tasks with well-known tools."
    assert outcome("She performs system adminis-", text) == VERIFIED
    assert outcome("tration tasks with well-", text) == VERIFIED
    assert outcome("She performs system admini-", text) != VERIFIED
    assert outcome("She performs system adminis-", "She performs system administration.") != VERIFIED


def test_the_first_of_many_and_how_many() -> None:
    text = "Box 1 is red.\nBox 2 is red.\nBox 3 is red.\n"
    check = one("> is red.", text_file("nothing"), text_file(text, "boxes.txt"), text_file(text, "more.txt"))
    assert check.occurrences == 6
    assert check.passage is not None
    assert check.passage.where == "boxes.txt:1"


def test_as_it_is_written_comes_before_typography() -> None:
    check = one("> the 'red' box", text_file("the ‘red’ box\nthe 'red' box"))
    assert check.passage is not None
    assert check.passage.where == "log.txt:2"
    assert check.occurrences == 2


def test_an_answers_words_are_looked_for_in_its_quote_first() -> None:
    text = "Box 7 is red.\nBox 8 is blue and weighs 7 tons.\n"
    quote, number = Checker([text_file(text)]).check("> weighs 7 tons.\nIt is 7 tons.")
    assert number.passage is not None
    assert number.passage.where == "log.txt:2"
    assert number.occurrences == 2


def test_pages_of_several_documents_have_names() -> None:
    check = one("> Page two here", paged("Page one", "Page two here"), text_file(LOG))
    assert check.passage is not None
    assert check.passage.where == "book.pdf, p. ii (PDF page 2)"


# --- what is not verified -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("The tower at Hollin Fell is 56 metres high", MISSING),  # a digit
        ("The tower at Hollin Fell is 5 metres high", MISSING),
        ("It has 1,200 steps, a lift for 1 persons", MISSING),
        ("It has 200 steps, a lift for 12 persons", MISSING),
        ("200 steps, a lift for 12 persons", MISSING),  # the end of a number
        ("and was built in 187", MISSING),
        ("5 degree cellar; 3.9 tons of coal", MISSING),  # -5
        ("a lift for persons, and a -5 degree cellar", MISSING),  # a number left out
        ("The gate must be opened before the harbour master has signed.", REPAIRED),
        ("The tower at Hollin Hill is 55 metres high", REPAIRED),
        ("the Tower at hollin fell is 55 metres high", REPAIRED),
        ("The tower, at Hollin Fell, is 55 metres high!", REPAIRED),
        ("The keeper is Oliver Brand, says the harbour", MISSING),
        ("The gate must not be opened before the mayor of Dunwark agrees.", MISSING),  # 0.67 alike
        ("The tower at Hollin Fell has 1,200 steps, a lift for 12 persons", MISSING),  # two halves
        ("he tower at Hollin Fell is 55 metres high", REPAIRED),  # the middle of a word
        ("The tower at Hollin\ufffdFell is 55 metres high", MISSING),
    ],
)
def test_what_is_near_is_not_verified(quote: str, expected: str) -> None:
    check = one(f"> {quote}")
    assert check.outcome == expected
    assert check.occurrences == 0


def test_a_repair_has_the_sources_own_words() -> None:
    check = one("> The gate must be opened before the harbour master has signed.")
    assert check.passage is not None
    assert check.passage.text == "The gate must not be opened before the harbour master has signed"
    assert check.passage.where == "log.txt:4"
    missing = one("> The tower at Hollin Fell is 56 metres high")
    assert missing.passage is not None
    assert missing.passage.text == "The tower at Hollin Fell is 55 metres high"
    assert one("> Nothing of the kind was ever said.").passage is None


@pytest.mark.parametrize(
    ("quote", "nearest"),
    [
        ("and so the tower at Hollin Fell", "The tower at Hollin Fell"),
        ("the harbour master has signed. But nobody came", "the harbour master has signed"),
    ],
)
def test_a_quote_that_goes_on_where_the_text_does_not(quote: str, nearest: str) -> None:
    check = one(f"> {quote}")
    assert check.outcome != VERIFIED
    assert check.passage is not None
    assert check.passage.text == nearest


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("55", VERIFIED),
        ("12", VERIFIED),
        ("1,200", VERIFIED),
        ("-5", VERIFIED),
        ("3.9", VERIFIED),
        ("DH-0609-K", VERIFIED),
        ("gate_seven()", VERIFIED),
        ("Priya Ansell", VERIFIED),
        ("1200", REPAIRED),
        ("DH0609K", REPAIRED),
        ("PRIYA ANSELL", REPAIRED),
        ("5", MISSING),
        ("1", MISSING),
        ("200", MISSING),
        ("120", MISSING),
        ("39", MISSING),
        ("9", MISSING),
        ("DH-0609", VERIFIED),
        ("DH-0609-L", MISSING),
        ("DH-0606-K", MISSING),
        ("gate_sev()", MISSING),
        ("`seven`", MISSING),
        ("Priya Ansel", MISSING),
        ("Priya Anselle", MISSING),
    ],
)
def test_short_things_match_whole(item: str, expected: str) -> None:
    assert one(item).outcome == expected


def test_what_could_not_be_read_is_never_verified() -> None:
    text = "The box F\ufffd13 holds the spare lamp."
    assert outcome("The box F\ufffd13 holds the spare lamp.", text) == MISSING
    assert outcome("13 holds the spare lamp.", text) == VERIFIED


def test_accents_are_part_of_a_word() -> None:
    assert one("> the cafe", text_file("the cafe\u0301 opens")).outcome != VERIFIED
    assert one("> the café", text_file("the cafe\u0301 opens")).outcome == VERIFIED


def test_words_without_spaces_between() -> None:
    text = "灯台の高さは55メートルです。"
    assert outcome("高さは55メートル", text) == VERIFIED
    assert outcome("高さは56メートル", text) != VERIFIED
    assert outcome("高さは5メートル", text) != VERIFIED


def test_words_run_together_by_a_pdf_are_a_repair() -> None:
    check = one("> flags must be ignored by", text_file("Unknownflagsmustbeignoredby debian/rules."))
    assert check.outcome == REPAIRED
    assert check.passage is not None
    assert check.passage.text == "Unknownflagsmustbeignoredby"


def test_strict() -> None:
    checker = Checker([text_file(LOG)])
    require_verified(checker.check("> The keeper is Priya Ansell.\nPriya Ansell"))
    require_verified([])
    with pytest.raises(QuoteFailed, match="1 of 2"):
        require_verified(checker.check("> The keeper is Priya Ansell.\n56"))
    with pytest.raises(QuoteFailed, match="1 of 1"):
        require_verified(checker.check("> the keeper is Priya Ansell!"))


# --- what an answer claims ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("The document does not say.", []),
        ("", []),
        (">", []),
        ('> ---\n> ...\nIt says `==` and "...".', []),
        ("Yes.", []),
        ("No, I don't think so. It isn't there, and I'm sure.", []),
        ("> a quote\n12", ["a quote", "12"]),
        ('> "a quote"', ["a quote"]),
        ("Priya Ansell", ["Priya Ansell"]),
        ("Paris.", ["Paris"]),
        ("Nobody came.", []),
        ("It was built by Abel Thorne in 1871.", ["Abel Thorne", "1871"]),
        ("Abel Thorne's tower has 12 steps", ["Abel Thorne", "12"]),
        ("It is in force from 1 April 2025.", ["1 April 2025"]),
        ("1. first\n2) second\n- third", []),
        ('He says "the red box," and left', ["the red box"]),
        ("He says “the red box” and ‘a lid’", ["the red box", "a lid"]),
        ("Call `store.open(1)` or load_all() in config.toml", ["store.open(1)", "load_all()", "config.toml"]),
        ("At 07:45 it is -5 degrees, not 1,200.5", ["At 07:45", "-5", "1,200.5"]),
        (
            "See DH-0609-K, camelCase, NATO and --max-size",
            ["See DH-0609-K", "camelCase", "NATO", "--max-size"],
        ),
        ("e.g. and/or i.e. well-known", []),
        ("[/x] [bold]12[/bold]", ["12"]),
    ],
)
def test_what_is_looked_up(answer: str, found: list[str]) -> None:
    assert [claim.text for claim in claims(answer)] == found


def test_a_capital_at_a_sentences_start_may_mean_nothing() -> None:
    text = "In the year 1871 the pier was built. The North Pier is long; a pier is a pier, in short."
    checks = Checker([text_file(text)]).check(
        "In 1871 it was built. A North Pier is long. Rosaline Meek built it."
    )
    assert [(c.text, c.outcome) for c in checks] == [
        ("1871", VERIFIED),
        ("North Pier", VERIFIED),
        ("Rosaline Meek", MISSING),
    ]


def test_a_phrase_that_is_not_there_is_looked_up_in_parts() -> None:
    checks = Checker([text_file("In May 2025, on day 1, Abel Thorne left.")]).check(
        "He left on 1 April 2025."
    )
    assert [(c.text, c.outcome) for c in checks] == [("1", VERIFIED), ("April", MISSING), ("2025", VERIFIED)]


def test_nothing_twice_and_nothing_without_documents() -> None:
    assert len(Checker([text_file(LOG)]).check("It is 55, and 55 again, or 55.")) == 1
    assert Checker([]).check("> a quote\n55") == []


# --- many random ones ---------------------------------------------------------------------------------------


def random_passage(draw: random.Random, document: Document) -> tuple[int, int]:
    words = [match.span() for match in re.finditer(r"\S+", document.text)]
    first = draw.randrange(len(words) - 30)
    return words[first][0], words[first + draw.randint(5, 29)][1]


@pytest.mark.parametrize("seed", range(60))
def test_true_passages_verify_where_they_stand(seed: int, samples: tuple[Document, ...]) -> None:
    draw = random.Random(seed)
    document = draw.choice(samples)
    start, end = random_passage(draw, document)
    quote = " ".join(document.text[start:end].split())
    check = Checker(samples).check(f"> {quote}")[0]
    assert check.outcome == VERIFIED
    assert check.passage is not None
    assert check.passage.document is document
    assert check.occurrences > 1 or (check.passage.start, check.passage.end) == (start, end)
    assert check.passage.first == document.locate(check.passage.start)


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_character_never_verifies(seed: int, samples: tuple[Document, ...]) -> None:
    """A digit is changed into another one; where there is none, a letter."""
    draw = random.Random(seed)
    document = draw.choice(samples)
    start, end = random_passage(draw, document)
    quote = " ".join(document.text[start:end].split())
    places = [m.start() for m in re.finditer(r"\d", quote)] or [
        m.start() for m in re.finditer("[a-z]", quote)
    ]
    at = draw.choice(places)
    letters = "0123456789" if quote[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    changed = quote[:at] + draw.choice(letters.replace(quote[at], "")) + quote[at + 1 :]
    check = Checker(samples).check(f"> {changed}")[0]
    assert check.outcome != VERIFIED
    if quote[at].isdigit():
        assert check.outcome == MISSING
