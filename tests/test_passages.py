"""The passages of a question: where the answer to a sample question stands, whole lines and sentences, within the budget."""

import json
from pathlib import Path

import pytest

from kvchat.documents import Document, Span, read_now
from kvchat.passages import BUDGET, Finder, units

SAMPLES = Path(__file__).parents[1] / "sample_docs"
QUESTIONS = [json.loads(line) for line in (SAMPLES / "questions.jsonl").read_text("utf-8").splitlines()]
CODE = """RETRIES = 7

def open_channel(host, timeout_s=31):
    \"\"\"Opens it.\"\"\"
    return host

def close_channel(host, timeout_s=12):
    return None
"""
PROSE = """The pier was lengthened twice, in the year 1904 and again after the great
storm. Its keeper was Mr. Ansell, who wrote: "It moves." The lamp is red.

A second pier stands to the north.
"""


def file(text: str, name: str = "a.txt") -> Document:
    return Document(name, text, (Span(0, len(text), line=1),))


@pytest.mark.parametrize("name", sorted({q["document"] for q in QUESTIONS}))
def test_the_answers_of_the_sample_questions_are_among_them(name: str) -> None:
    documents = read_now([SAMPLES / name]).documents
    finder = Finder(documents)
    asked = [q for q in QUESTIONS if q["document"] == name]
    found = [q["answer"] in " ".join(p.text for p in finder.find(q["question"])) for q in asked]
    assert sum(found) >= 0.95 * len(asked)
    others = [finder.find(q["question"]) for q in asked[1:] + asked[:1]]  # those of the next question
    wrong = [q["answer"] in " ".join(p.text for p in o) for q, o in zip(asked, others, strict=True)]
    assert sum(wrong) < 0.5 * len(asked)


def test_passages_are_the_documents_own_and_few() -> None:
    text = "".join(f"The code of box {i} is {i * 7919}.\n" for i in range(2000))
    document = file(text)
    passages = Finder([document]).find("What is the code of box 1234?")
    assert "The code of box 1234 is 9772046." in passages[-1].text
    assert sum(len(p.text) for p in passages) <= BUDGET
    assert all(text[p.start : p.end] == p.text for p in passages)
    spans = sorted((p.start, p.end) for p in passages)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert passages[-1].where.startswith("a.txt:")


def test_identifiers_are_whole_and_in_parts() -> None:
    finder = Finder([file(CODE, "channel.py"), file(PROSE)])
    best = finder.find("default of timeout_s in close_channel?")[-1]
    assert "close_channel(host, timeout_s=12)" in best.text
    assert "open_channel(host, timeout_s=31)" in finder.find("how do I open a channel?")[-1].text


def test_nothing_in_common_is_nothing() -> None:
    finder = Finder([file(PROSE)])
    assert finder.find("Zebras?") == []
    assert finder.find("?!") == []
    assert Finder([]).find("The pier?") == []
    assert Finder([file("\n \n")]).find("The pier?") == []


def test_units_are_sentences_and_lines() -> None:
    pieces = [PROSE[start:end] for start, end in units(PROSE)]
    assert pieces == [
        "The pier was lengthened twice, in the year 1904 and again after the great\nstorm.",
        "Its keeper was Mr.",
        'Ansell, who wrote: "It moves."',
        "The lamp is red.",
        "A second pier stands to the north.",
    ]
    lines = [CODE[start:end] for start, end in units(CODE)]
    assert lines[:2] == ["RETRIES = 7", "def open_channel(host, timeout_s=31):"]


def test_what_ties_is_the_same_every_time() -> None:
    text = "The red lamp.\n" * 50
    first, second = (Finder([file(text)]).find("red lamp") for _ in range(2))
    assert [(p.start, p.end) for p in first] == [(p.start, p.end) for p in second]
