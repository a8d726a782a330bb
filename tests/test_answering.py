"""A second look: when there is one, which answer stands, and that it leaves the session as if nothing else had been."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import END, spelled, tiny_loaded, tiny_tokenizer

from kvchat.answering import Again, Answering, look
from kvchat.documents import Document, Span
from kvchat.engine import Engine, Sampling
from kvchat.kv.format import parse
from kvchat.session import Session, Turn

TEXT = "The harbour has two piers.\n" * 30 + "The code of the red box is 7731.\n" + "The sea is wide.\n" * 30
QUESTION = "What is the code of the red box?"
RIGHT = "> The code of the red box is 7731.\n7731"
REPAIRED = "> The code of the Red Box is 7731."
WRONG = "> The code of the red box is 9999.\n9999"
UNKNOWN = "The document does not say."
IDLE = "It is about a harbour."

Says = Callable[..., None]


@pytest.fixture(scope="module")
def loaded() -> Any:
    return tiny_loaded(context=4096)


@pytest.fixture
def session(loaded: Any) -> Session:
    document = Document("box.txt", TEXT, (Span(0, len(TEXT), line=1),))
    session = Session(loaded, parse("kivi2:window=64"), [document], chunk=256)
    for _ in session.read():
        pass
    return session


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Make the model answer with these texts in turn, whatever it computes."""

    def says(*texts: str) -> None:
        tokenizer = tiny_tokenizer()
        ids = itertools.chain.from_iterable([*spelled(tokenizer, text), END] for text in texts)
        monkeypatch.setattr(Engine, "_choose", lambda *_: next(ids))

    return says


def asked(session: Session, reread: Any = "auto") -> tuple[Answering, list[str | Again]]:
    asked = Answering(session, QUESTION, Sampling(max_tokens=200), reread)
    return asked, list(asked.pieces())


def rereads(pieces: list[str | Again]) -> int:
    return sum(isinstance(piece, Again) for piece in pieces)


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        (WRONG, RIGHT, RIGHT),
        (WRONG, REPAIRED, REPAIRED),
        (WRONG, UNKNOWN, UNKNOWN),
        (WRONG, WRONG, WRONG),
        (UNKNOWN, RIGHT, RIGHT),
        (UNKNOWN, REPAIRED, REPAIRED),
        (UNKNOWN, WRONG, UNKNOWN),
        (REPAIRED, RIGHT, RIGHT),
        (REPAIRED, UNKNOWN, REPAIRED),
        (REPAIRED, WRONG, REPAIRED),
    ],
)
def test_which_answer_stands(session: Session, says: Says, first: str, second: str, stands: str) -> None:
    says(first, second)
    answering, pieces = asked(session)
    assert rereads(pieces) == 1
    assert "".join(p for p in pieces if isinstance(p, str)) == first + second
    assert [turn.answer for turn in session.turns] == [stands]
    assert answering.last.turn is session.turns[-1]
    assert answering.last.checks == look(session, session.turns[-1]).checks
    assert answering.first is not None and answering.first.turn.answer == first
    assert bool(session.turns[-1].context) == (stands != first)


@pytest.mark.parametrize("answer", [RIGHT, IDLE, "> The sea is wide.\nwide"])
def test_what_is_verified_or_claims_nothing_is_not_asked_again(
    session: Session, says: Says, answer: str
) -> None:
    says(answer)
    answering, pieces = asked(session)
    assert (rereads(pieces), answering.first, answering.passages) == (0, None, ())
    assert session.turns[-1].context == ""


def test_always_and_never(session: Session, says: Says) -> None:
    says(WRONG)
    answering, pieces = asked(session, "always")
    assert rereads(pieces) == 0 and answering.passages
    context = session.turns[-1].context
    assert context.endswith(".\n\n") and "The code of the red box is 7731." in context
    assert session.turns[-1].question == QUESTION
    session.clear()
    says(WRONG)
    answering, pieces = asked(session, "never")
    assert (rereads(pieces), answering.passages, session.turns[-1].context) == (0, (), "")


def test_the_model_reads_the_passages_before_the_question(
    session: Session, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    generate = Engine.generate

    def recording(engine: Engine, ids: Any, *args: Any) -> Any:
        read[:] = ids
        return generate(engine, ids, *args)

    monkeypatch.setattr(Engine, "generate", recording)
    says(WRONG, RIGHT)
    asked(session)
    text = session.loaded.tokenizer.decode(read)
    assert "is 7731.\n" in text and f"\n\n{QUESTION}<|im_end|>" in text


def test_a_first_answer_that_stands_leaves_no_trace_of_the_second(session: Session, says: Says) -> None:
    """The next answer's logits are those of a session that was never asked again, but for the order of sums."""

    def logits(*texts: str, reread: Any) -> torch.Tensor:
        session.clear()
        says(*texts)
        asked(session, reread)
        session.engine._forward(session._pending + session.prompt.question_ids("And?"))
        assert session.engine._logits is not None
        return session.engine._logits[-1].float()

    once = logits(UNKNOWN, reread="never")
    again = logits(UNKNOWN, WRONG, reread="auto")
    other = logits(WRONG, reread="never")
    scale = once.abs().max()
    assert (again - once).abs().max() < 0.02 * scale
    assert (other - once).abs().max() > 0.05 * scale  # the difference shows


def test_earlier_turns_stay(session: Session, says: Says) -> None:
    says("It is red.", WRONG, WRONG, UNKNOWN, RIGHT)
    list(session.ask("Which colour?"))
    earlier = session.turns[0]
    asked(session)
    asked(session)
    assert [t.answer for t in session.turns] == ["It is red.", WRONG, RIGHT]
    assert session.turns[0] is earlier


@pytest.mark.parametrize("left_after", [1, 5])
def test_left_in_the_second_answer_the_first_stands(session: Session, says: Says, left_after: int) -> None:
    says(WRONG, RIGHT)
    answering = Answering(session, QUESTION, Sampling(max_tokens=200))
    pieces = answering.pieces()
    for piece in pieces:
        if isinstance(piece, Again):
            break
    for _ in range(left_after):
        next(pieces)
    pieces.close()
    assert answering.interrupted
    assert [turn.answer for turn in session.turns] == [WRONG]
    assert answering.last.turn is session.turns[0] and answering.second is None


def test_left_in_the_first_answer_there_is_no_second(session: Session, says: Says) -> None:
    says(WRONG, RIGHT)
    answering = Answering(session, QUESTION, Sampling(max_tokens=200))
    pieces = answering.pieces()
    for _ in range(20):
        next(pieces)
    pieces.close()
    assert answering.interrupted and answering.first is None
    assert session.turns[-1].answer == WRONG[:20]


def test_without_room_to_ask_again_the_first_stands_and_that_is_said(loaded: Any, says: Says) -> None:
    text = TEXT + "x" * (4096 - len(TEXT) - 330)
    session = Session(
        loaded, parse("kivi2"), [Document("box.txt", text, (Span(0, len(text), line=1),))], chunk=1024
    )
    for _ in session.read():
        pass
    says(WRONG)
    answering = Answering(session, QUESTION, Sampling(max_tokens=45))
    list(answering.pieces())
    assert [turn.answer for turn in session.turns] == [WRONG]
    assert "no room to ask again" in answering.note and answering.second is None


def test_a_cut_answer_is_asked_again_too(session: Session, says: Says) -> None:
    says(WRONG, RIGHT)
    answering = Answering(session, QUESTION, Sampling(max_tokens=len(RIGHT) - 2))
    list(answering.pieces())
    assert answering.second is not None


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        (UNKNOWN, True),
        ("The text doesn't mention it.", True),
        ("The document doesn’t state when.", True),
        ("This passage does not contain the number.", True),
        ("> The document is not new.\nnot new", False),
        ("The document says 7731.", False),
        ("It does not say much, said he.", False),
    ],
)
def test_what_counts_as_not_knowing(session: Session, answer: str, unknown: bool) -> None:
    assert look(session, Turn("?", answer)).unknown is unknown


def test_no_documents_no_second_look(loaded: Any, says: Says) -> None:
    session = Session(loaded, parse("kivi4"))
    for _ in session.read():
        pass
    says(UNKNOWN)
    _, pieces = asked(session)
    assert rereads(pieces) == 0
