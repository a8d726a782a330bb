"""The sample documents and the questions about them keep each other's word."""

import json
import re
import runpy
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvchat.documents import Document, read_now

SAMPLES = Path(__file__).parents[1] / "sample_docs"
QUESTIONS = [json.loads(line) for line in (SAMPLES / "questions.jsonl").read_text("utf-8").splitlines()]


@cache
def reading(document: str) -> tuple[Document, ...]:
    return read_now([SAMPLES / document]).documents


def collapsed(text: str) -> tuple[str, list[int]]:
    """Text with each run of white space as one space, and where each of its characters stood."""
    characters: list[str] = []
    offsets: list[int] = []
    for offset, character in enumerate(text):
        if character.isspace():
            if characters[-1:] == [" "]:
                continue
            character = " "
        characters.append(character)
        offsets.append(offset)
    return "".join(characters), offsets


def test_there_are_forty_questions_and_none_twice() -> None:
    assert len(QUESTIONS) == 40
    assert max(Counter(q["question"] for q in QUESTIONS).values()) == 1
    assert len({q["document"] for q in QUESTIONS}) >= 3
    assert all(set(q) == {"document", "question", "answer", "where", "quote"} for q in QUESTIONS)


@pytest.mark.parametrize("entry", QUESTIONS, ids=lambda entry: entry["answer"][:30])
def test_a_question_is_answered_where_it_says(entry: dict[str, Any]) -> None:
    texts = [collapsed(document.text) for document in reading(entry["document"])]
    quote = collapsed(entry["quote"])[0]
    (found,) = [i for i, (text, _) in enumerate(texts) if quote in text]
    text, offsets = texts[found]
    assert text.count(quote) == 1
    assert str(reading(entry["document"])[found].locate(offsets[text.index(quote)])) == entry["where"]
    assert entry["answer"] in quote
    whole = re.compile(rf"(?<!\w){re.escape(entry['answer'])}(?!\w)")
    assert sum(len(whole.findall(text)) for text, _ in texts) == 1
    assert entry["answer"] not in entry["question"]


def test_the_handbook_has_two_kinds_of_page_numbers() -> None:
    spans = reading("harbour-handbook.pdf")[0].spans
    assert len(spans) >= 20
    assert [span.page for span in spans] == list(range(1, len(spans) + 1))
    assert [span.label for span in spans] == ["i", "ii", "iii", "iv", *map(str, range(1, len(spans) - 3))]


def test_the_handbook_is_made_by_its_script(tmp_path: Path) -> None:
    pytest.importorskip("fpdf")
    script = runpy.run_path(str(SAMPLES / "make_pdf.py"))
    pages = script["read_source"](script["SOURCE"].read_text("utf-8"))
    copy = tmp_path / "harbour-handbook.pdf"
    script["make"](pages).output(copy)
    (made,), (kept,) = read_now([copy]).documents, reading("harbour-handbook.pdf")
    assert (made.text, made.spans, made.notes) == (kept.text, kept.spans, kept.notes)
