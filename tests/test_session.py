"""`Session`: documents read once, questions that leave no trace when taken back, text that streams whole."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from tiny import END, spelled, tiny_loaded
from torch import Tensor

from kvchat import session as session_module
from kvchat.documents import Document, Span
from kvchat.engine import Engine, Sampling
from kvchat.errors import DoesNotFit, KVChatError
from kvchat.kv.cache import KVCache
from kvchat.kv.format import parse
from kvchat.kv.layer import PackedLayer
from kvchat.memory import human
from kvchat.models.tokens import ANSWER_ROOM
from kvchat.session import Session

TEXT = "".join(f"Line {i}: the number of crate {i * 37 % 101} is {i * 7919 % 10007}.\n" for i in range(12))
LIMIT = 70


def document(text: str = TEXT, name: str = "crates.txt") -> Document:
    return Document(name, text, (Span(0, len(text), line=1),))


@pytest.fixture(scope="module")
def loaded() -> Any:
    return tiny_loaded()


@pytest.fixture
def read_ids(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every run of ids that an engine puts through its model, in order."""
    seen: list[list[int]] = []
    forward = Engine._forward

    def recording(engine: Engine, ids: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(list(ids))
        forward(engine, ids, *args, **kwargs)

    monkeypatch.setattr(Engine, "_forward", recording)
    return seen


def opened(loaded: Any, spec: str = "kivi2:window=0", text: str = TEXT) -> Session:
    session = Session(loaded, parse(spec), [document(text)], chunk=100)
    for _ in session.read():
        pass
    return session


def asked(session: Session, question: str, **settings: Any) -> tuple[str, int]:
    text = "".join(session.ask(question, Sampling(**{"max_tokens": LIMIT, **settings})))
    assert session.turns[-1].answer == text
    return text, session.turns[-1].tokens


def state(session: Session) -> list[Tensor]:
    tensors: list[Tensor] = []
    for layer in session.engine.cache.layers:
        if isinstance(layer, PackedLayer):
            for _, keys, values in layer.tiles():
                tensors += [keys.clone(), values.clone()]
        else:
            tensors += [layer.keys.clone(), layer.values.clone()]
    return tensors


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def scripted(monkeypatch: pytest.MonkeyPatch, answer: Iterable[int]) -> None:
    """The model answers with these ids, whatever it computes."""
    ids = iter(answer)
    monkeypatch.setattr(Engine, "_choose", lambda *_: next(ids))


# --- reading ------------------------------------------------------------------------------------------------


def test_reading_measures_every_chunk(loaded: Any) -> None:
    session = Session(loaded, parse("kivi2:window=0"), [document()], chunk=100)
    assert session.unread
    seen = list(session.read())
    count = len(session.prefix)
    assert [usage.tokens for usage in seen] == [*range(100, count, 100), count, count]
    assert seen[-1].in_use == session.engine.cache.nbytes == session.usage(count).in_use
    assert not session.unread
    assert list(session.read()) == []


@pytest.mark.parametrize("left_after", range(1, 8))
def test_reading_goes_on_where_it_was_left(loaded: Any, left_after: int) -> None:
    whole = opened(loaded)
    session = Session(loaded, parse("kivi2:window=0"), [document()], chunk=100)
    steps = session.read()
    for _ in islice(steps, left_after):
        pass
    steps.close()
    for _ in session.read():
        pass
    assert same(state(session), state(whole))
    assert asked(session, "why?") == asked(whole, "why?")
    assert whole.engine.tokens > 600, "enough chunks that the loop above leaves early"


def test_another_chunk_size_is_another_state(loaded: Any) -> None:
    session = Session(loaded, parse("kivi2:window=0"), [document()], chunk=99)
    for _ in session.read():
        pass
    assert not same(state(session), state(opened(loaded)))


def test_a_question_before_the_document_is_read(loaded: Any) -> None:
    session = Session(loaded, parse("kivi2"), [document()], chunk=100)
    with pytest.raises(KVChatError, match="read it first"):
        next(session.ask("why?"))
    next(session.read())
    with pytest.raises(KVChatError, match="read it first"):
        next(session.ask("why?"))
    assert session.turns == []


def test_no_document_is_a_conversation(loaded: Any) -> None:
    session = Session(loaded, parse("kivi2"))
    for _ in session.read():
        pass
    assert asked(session, "why?")[1] > 0


class Broken(BaseException):
    """As a Ctrl-C in the middle of a forward pass."""


def break_layer(patch: pytest.MonkeyPatch, loaded: Any, after: int) -> None:
    """From now on, the third layer's pass number `after` raises, when two layers have taken the chunk in."""
    attention = loaded.model.model.layers[2].self_attn
    forward, calls = attention.forward, iter(range(10**6))

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise Broken
        return forward(*args, **kwargs)

    patch.setattr(attention, "forward", breaking)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_reading_starts_anew_after_an_interrupt_inside_a_chunk(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole = opened(loaded)
    session = Session(loaded, parse("kivi2:window=0"), [document()], chunk=100)
    with monkeypatch.context() as patch:
        break_layer(patch, loaded, after)
        with pytest.raises(Broken):
            list(session.read())
    assert session.unread
    for _ in session.read():
        pass
    assert same(state(session), state(whole))


# --- asking and taking back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["undo", "clear"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_question_taken_back_leaves_no_trace(family: str, back: str) -> None:
    session = opened(tiny_loaded(family))
    before, packed = state(session), session.engine.cache.layers[1].packed_tokens
    answers = []
    for question in ("first?", "second, a longer one?", "first?"):
        answers.append(asked(session, question))
        assert session.engine.cache.layers[1].packed_tokens > packed, "the answer packs blocks"
        getattr(session, back)()
        assert same(state(session), before)
        assert session.turns == []
    assert answers[0] == answers[2] != answers[1]


def test_without_taking_back_the_answer_is_another_one(loaded: Any) -> None:
    """Negative control: the history counts."""
    session = opened(loaded)
    assert asked(session, "first?") != asked(session, "first?")


def test_undo_takes_one_turn(loaded: Any) -> None:
    session = opened(loaded)
    asked(session, "first?")
    after_first = state(session)
    second = asked(session, "second?")
    turn = session.undo()
    assert turn is not None and turn.question == "second?"
    assert same(state(session), after_first)
    assert asked(session, "second?") == second
    session.undo(), session.undo()
    assert session.undo() is None
    assert session.turns == []


def test_clear_before_reading_is_harmless(loaded: Any) -> None:
    session = Session(loaded, parse("kivi2"), [document()])
    session.clear()
    assert session.unread


def conversation(session: Session, turns: list[tuple[str, list[int]]]) -> list[int]:
    ids, prompt = list(session.prefix), session.prompt
    for i, (question, answer) in enumerate(turns):
        ids += (prompt.next_ids() if i else []) + prompt.question_ids(question) + answer
    return ids


@pytest.mark.parametrize("pieces", [1, 2, 30])
def test_leaving_an_answer_keeps_what_was_said(
    loaded: Any, pieces: int, monkeypatch: pytest.MonkeyPatch, read_ids: list[list[int]]
) -> None:
    first = spelled(loaded.tokenizer, "an answer that is left before its end, somewhere")
    second = spelled(loaded.tokenizer, "the second")
    session = opened(loaded)
    scripted(monkeypatch, first)
    answer = session.ask("first?", Sampling(max_tokens=LIMIT))
    got = "".join(islice(answer, pieces))
    answer.close()
    turn = session.turns[-1]
    assert (turn.answer, turn.stopped, turn.tokens) == (got, "interrupted", pieces)
    assert len(got) == pieces
    scripted(monkeypatch, [*second, END])
    assert asked(session, "second?") == ("the second", len(second))
    assert session.turns[-1].stopped == ""
    # the model has read exactly the conversation, each token once
    passes = list(read_ids)
    assert [i for ids in passes for i in ids] == conversation(
        session, [("first?", first[:pieces]), ("second?", second)]
    )
    # and its cache is the one that these ids give
    replica = opened(loaded)
    replica.engine.cache = fresh = KVCache(loaded.model, session.fmt)
    with torch.no_grad():
        for ids in passes:
            loaded.model(torch.tensor([ids]), cache=fresh, use_cache=True, logits_to_keep=1)
            if fresh.get_seq_length() == len(session.prefix):
                fresh.seal()
    assert same(state(replica), state(session))


def test_an_answer_that_was_never_started_is_no_turn(loaded: Any) -> None:
    session = opened(loaded)
    session.ask("first?").close()
    assert session.turns == []


@pytest.mark.parametrize(
    ("said", "limit", "stopped"), [("abc", 10, ""), ("abcdef", 6, "max-tokens"), ("abc", 3, "max-tokens")]
)
def test_how_an_answer_ends_and_what_follows(
    loaded: Any,
    said: str,
    limit: int,
    stopped: str,
    monkeypatch: pytest.MonkeyPatch,
    read_ids: list[list[int]],
) -> None:
    session = opened(loaded)
    scripted(monkeypatch, [*spelled(loaded.tokenizer, said), END])
    assert asked(session, "first?", max_tokens=limit) == (said, len(said))
    assert session.turns[-1].stopped == stopped
    scripted(monkeypatch, [END])
    assert asked(session, "second?") == ("", 0)
    assert [i for ids in read_ids for i in ids] == conversation(
        session, [("first?", spelled(loaded.tokenizer, said)), ("second?", [])]
    )


def test_an_answer_ends_where_the_context_does(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_loaded(context=1000)
    session = opened(small)
    left = 1000 - session.engine.tokens - len(session.prompt.question_ids("first?"))
    asked_for = left + 50
    scripted(monkeypatch, spelled(small.tokenizer, "x" * asked_for))
    text, count = asked(session, "first?", max_tokens=asked_for)
    assert (session.turns[-1].stopped, count, text) == ("context", left, "x" * left)
    assert session.engine.tokens == 1000 - 1
    with pytest.raises(DoesNotFit, match="/clear"):
        next(session.ask("second?", Sampling(max_tokens=asked_for)))
    assert len(session.turns) == 1


@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupt_inside_a_pass_takes_the_turn_back(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    session = opened(loaded)
    before = state(session)
    wanted = asked(session, "first?")
    session.undo()
    with monkeypatch.context() as patch:
        break_layer(patch, loaded, after)
        with pytest.raises(Broken):
            asked(session, "first?")
    assert session.turns == []
    assert same(state(session), before)
    assert asked(session, "first?") == wanted


def test_seeds(loaded: Any) -> None:
    session = opened(loaded)
    answers = []
    for seed in (1, 1, 2):
        answers.append(asked(session, "why?", temperature=3.0, seed=seed))
        session.undo()
    assert answers[0] == answers[1] != answers[2]


# --- what fits ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaForCausalLM.forward", computed)


@pytest.mark.usefixtures("no_forward")
def test_a_document_beyond_the_context_is_refused_at_once(loaded: Any) -> None:
    needed = len(Session(loaded, parse("kivi2"), [document()]).prefix)
    exactly = replace(loaded, context=needed + ANSWER_ROOM)
    Session(exactly, parse("kivi2"), [document()])
    with pytest.raises(DoesNotFit, match=rf"{needed:,} tokens.*reads {needed + ANSWER_ROOM - 1:,} .*--pages"):
        Session(replace(loaded, context=needed + ANSWER_ROOM - 1), parse("kivi2"), [document()])


@pytest.mark.usefixtures("no_forward")
def test_a_cache_beyond_the_memory_is_refused_at_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(loaded, parse("fp16"), [document()])
    planned = session.usage(len(session.prefix) + ANSWER_ROOM)
    monkeypatch.setattr(session_module, "free_bytes", lambda _: planned.in_use)
    Session(loaded, parse("fp16"), [document()])
    monkeypatch.setattr(session_module, "free_bytes", lambda _: planned.in_use - 1)
    numbers = human(planned.in_use)
    with pytest.raises(
        DoesNotFit, match=rf"fp16 needs {numbers} for .* tokens and {numbers} are free; --kv kivi4 would fit"
    ):
        Session(loaded, parse("fp16"), [document()])
    monkeypatch.setattr(session_module, "free_bytes", lambda _: 1000)
    with pytest.raises(DoesNotFit, match="1000 B are free; no format would fit"):
        Session(loaded, parse("kivi2"), [document()])


def test_a_question_that_does_not_fit_is_refused_before_it_is_a_turn(
    loaded: Any, request: pytest.FixtureRequest
) -> None:
    session = opened(loaded)
    before = state(session)
    request.getfixturevalue("no_forward")
    with pytest.raises(
        DoesNotFit, match=rf"needs \d+ tokens.*only {2048 - len(session.prefix)} of 2048.*ask a shorter one"
    ):
        next(session.ask("why " * 1000))
    assert session.turns == [] and same(state(session), before)


# --- streaming ----------------------------------------------------------------------------------------------


ANSWERS = [
    "ok 🤰👍🏽 fin",
    "prefix \ufffd after",
    "ends with \ufffd",
    "\ufffd",
    "\ufffd\ufffd starts",
    "नमस्ते दुनिया",
    "<|im_end|> and <|im_start|>user",
    "\x1b[2J tab\t[/x] [bold\r\n",
    " leading space",
    "",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_pieces_are_whole_characters(loaded: Any, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(loaded, "fp16", "short")
    scripted(monkeypatch, [*spelled(loaded.tokenizer, answer), END])
    pieces = list(session.ask("say it", Sampling(max_tokens=LIMIT)))
    assert "".join(pieces) == answer == session.turns[-1].answer
    assert session.turns[-1].tokens == len(answer.encode())
    assert session.turns[-1].stopped == ""
    if "\ufffd" not in answer:
        assert pieces == list(answer), "each character as soon as its last byte is there"


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("ending", ["max-tokens", "stop", "left"])
def test_an_answer_cut_inside_a_character(
    loaded: Any, cut: int, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(loaded, "fp16", "short")
    ids = spelled(loaded.tokenizer, b"ok " + "🤰".encode()[:cut])
    scripted(monkeypatch, [*ids, END, END])
    limit = len(ids) if ending == "max-tokens" else LIMIT
    answer = session.ask("say it", Sampling(max_tokens=limit))
    text = "".join(islice(answer, 3)) if ending == "left" else "".join(answer)
    answer.close()
    assert text == session.turns[-1].answer == ("ok " if ending == "left" else "ok \ufffd")
    scripted(monkeypatch, [*spelled(loaded.tokenizer, "next"), END])
    assert asked(session, "and then?")[0] == "next"


@pytest.mark.parametrize("data", [b"a\xffb", b"\xe2\x82(", b"\xf0\x9f\xa4ok", b"\x80\x80\x80\x80\x80\x80 x"])
def test_broken_bytes_lose_no_text(loaded: Any, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(loaded, "fp16", "short")
    scripted(monkeypatch, [*spelled(loaded.tokenizer, data), END])
    text = asked(session, "say it")[0]
    assert text == data.decode("utf-8", "replace")


def test_only_an_id_stops_an_answer(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document may hold the spelling of a control token, and so may an answer about it."""
    spelling = "A turn ends with <|im_end|> here."
    session = opened(loaded, "fp16", spelling)
    assert session.prefix.count(END) == 3  # system, the document, "Ready."
    scripted(
        monkeypatch, [*spelled(loaded.tokenizer, spelling), END, *spelled(loaded.tokenizer, "never said")]
    )
    assert asked(session, "what ends a turn?")[0] == spelling
