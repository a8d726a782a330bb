"""`Session`: documents open in one engine. Reads them once, answers questions about them, and rolls back exactly."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from kvchat.documents import Document
from kvchat.engine import SEGMENT, Engine, Sampling
from kvchat.errors import DoesNotFit, KVChatError
from kvchat.kv.calibration import Calibration
from kvchat.kv.format import PRESETS, KVFormat
from kvchat.memory import Usage, fits, human, usage
from kvchat.models.fingerprint import fingerprint
from kvchat.models.load import LoadedModel, free_bytes
from kvchat.models.tokens import ANSWER_ROOM, check_context
from kvchat.passages import Finder
from kvchat.prompt import Prompt
from kvchat.quotes import Checker
from kvchat.store import Entry, Key, Store

if TYPE_CHECKING:
    from kvchat.conversations import Said


@dataclass
class Turn:
    """A question and what became of it. Times in seconds; `first_token` counts from the question. `context` is what the model
    read before the question."""

    question: str
    answer: str = ""
    ids: list[int] = field(default_factory=list, repr=False)  # of the answer
    context: str = ""
    first_token: float = 0.0
    seconds: float = 0.0
    stopped: str = ""  # "", "interrupted", "max-tokens" or "context"
    _mark: list[Any] = field(default_factory=list, repr=False)
    _pending: list[int] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def tokens_per_second(self) -> float:
        decoding = self.seconds - self.first_token
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else 0.0


class Session:
    """One conversation about some documents (or none), in one KV format.

    The order of calls is: make it (checks that it fits, computes nothing), `read` it to the end, then `ask` as often as one
    likes. Generators may be left at any point; the session stays usable.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        fmt: KVFormat,
        documents: Sequence[Document] = (),
        system: str | None = None,
        chunk: int | None = None,
        segment: int = SEGMENT,
        store: Store | None = None,
        refresh: bool = False,
        calibration: Calibration | None = None,
    ):
        """store: where the prefilled cache is looked for and kept. refresh: read the documents anew all the same.
        calibration: of the model, where `fmt` needs one.

        Raises DoesNotFit, with the numbers, for documents beyond the model's context or the device's free memory.
        """
        self.loaded, self.fmt, self.documents = loaded, fmt, tuple(documents)
        self.calibration = calibration
        self.prompt = Prompt(loaded.tokenizer, system, with_document=bool(documents))
        self.prefix = self.prompt.prefix_ids([(d.name, d.text) for d in documents])
        self.checker, self.finder = Checker(self.documents), Finder(self.documents)
        self.turns: list[Turn] = []
        self.cache_notes: list[str] = []  # all that `notes` has given
        self.restored_tokens = 0
        self.restore_seconds = self.read_seconds = 0.0
        self._stop_ids = self.prompt.stop_ids(loaded.stop_ids)
        self._check_fits()
        self.engine = self._new_engine(chunk, segment)
        self._ends = self.engine.ends(len(self.prefix))
        self._closed = 0  # tokens up to the last of these ends that has been reached
        self._entry = self._open_entry(store, refresh) if store and documents else None
        self._pending: list[int] = []  # ids that the next question must bring into the cache first
        self._start: list[Any] | None = None

    @property
    def context(self) -> int:
        return self.loaded.context

    @property
    def unread(self) -> bool:
        """Whether `read` has not come to its end yet."""
        return self._start is None

    @property
    def reserved_bytes(self) -> int:
        """Bytes in use, and what the buffers hold ready beyond that."""
        return self.engine.cache.reserved_bytes

    def free_bytes(self) -> int:
        """What the device itself says is free."""
        return free_bytes(self.loaded.device)

    def usage(self, tokens: int | None = None) -> Usage:
        """The cache as it is, measured; or as it would be with `tokens` tokens, planned."""
        if tokens is not None:
            return usage(self.loaded.shape, self.fmt, tokens, self.loaded.dtype.itemsize)
        engine = self.engine
        return usage(
            self.loaded.shape, self.fmt, engine.tokens, self.loaded.dtype.itemsize, engine.cache.nbytes
        )

    def notes(self) -> list[str]:
        """What there is to say about the stored cache since the last call: why it is not used, or not kept."""
        if self._entry is None:
            return []
        notes, self._entry.notes = self._entry.notes, []
        self.cache_notes += notes
        return notes

    @property
    def stored(self) -> str | None:
        """The id of the stored cache, where there is one of the whole of the documents."""
        return self._entry.id if self._entry is not None and self._entry.whole else None

    def close(self) -> None:
        """Let other processes write and remove the stored cache."""
        if self._entry is not None:
            self._entry.close()

    def read(self) -> Generator[Usage]:
        """Bring the documents into the cache, from the store as far as it has them, yielding the measured usage after each
        chunk. Left early, it goes on at the next call."""
        if self._start is not None:
            return
        if self.engine.tokens == 0:
            self._restore()
            if 0 < self._closed < len(self.prefix):
                yield self.usage()
        started = time.perf_counter()
        try:
            for end in self._ends:
                if end > self._closed:
                    for _ in self.engine.prefill(self.prefix[self.engine.tokens : end]):
                        yield self.usage()
                    self._close(end)
        except GeneratorExit:
            raise
        except BaseException:
            # some layers may have read a chunk that others have not: the next call begins anew
            self._closed = 0
            self.engine = self._new_engine(self.engine.chunk, self.engine.segment)
            raise
        finally:
            self.read_seconds += time.perf_counter() - started
        self._start = self.engine.cache.snapshot()
        yield self.usage()

    def _restore(self) -> None:
        if self._entry is not None:
            started = time.perf_counter()
            loaded = self.loaded
            self._closed = self._entry.restore(self.engine.cache, loaded.shape, self.fmt, loaded.dtype)
            self.restored_tokens, self.restore_seconds = self._closed, time.perf_counter() - started

    def _close(self, end: int) -> None:
        if end == len(self.prefix):
            self.engine.cache.seal()
        else:
            self.engine.cache.close()
        if self._entry is not None:
            self._entry.append(self.engine.cache, self._closed, end)
        self._closed = end

    def ask(
        self,
        question: str,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        context: str = "",
    ) -> Generator[str]:
        """Answer a question, yielding text that never ends inside a character. `turns[-1]` is the turn, also while it runs.
        context: text for the model to read just before the question.

        Left early, the partial answer stays in the conversation. Raises DoesNotFit before anything is computed, and before
        the question enters the history.
        """
        if self.unread:
            raise KVChatError("the document has not been read to its end; read it first")
        ids = self._pending + self.prompt.question_ids(context + question)
        room = self._room(ids, sampling)
        turn = Turn(question, context=context, _mark=self.engine.cache.snapshot(), _pending=self._pending)
        self.turns.append(turn)
        limit = min(sampling.max_tokens, room)
        turn.stopped = "interrupted"  # unless it comes to its end
        try:
            yield from self._answer(turn, ids, limit, sampling)
        except GeneratorExit:
            raise
        except BaseException:
            self.undo()  # some layers may have read a token that others have not
            raise

    def check(self, question: str, sampling: Sampling = Sampling()) -> None:  # noqa: B008  # frozen
        """Raises DoesNotFit, before anything is read, where `ask` would do so as the first question; UsageError for text
        that isn't any (the bytes of another encoding)."""
        self._room(self.prompt.question_ids(question), sampling)

    def _room(self, ids: Sequence[int], sampling: Sampling) -> int:
        """Tokens that are left for an answer when `ids` have been read."""
        used = max(self.engine.tokens, len(self.prefix))
        room = self.context - used - len(ids)
        if room < min(ANSWER_ROOM, sampling.max_tokens):
            raise DoesNotFit(
                f"the question needs {len(ids)} tokens and an answer some more, but only "
                f"{max(0, self.context - used)} of {self.context} are left; "
                + ("start over with /clear" if self.turns else "ask a shorter one")
            )
        return room

    def _answer(self, turn: Turn, ids: list[int], limit: int, sampling: Sampling) -> Iterator[str]:
        backend = self.loaded.tokenizer.backend_tokenizer
        stream = DecodeStream(skip_special_tokens=False)
        started = time.perf_counter()
        self._pending = self.prompt.next_ids()
        for token in self.engine.generate(ids, replace(sampling, max_tokens=limit), self._stop_ids):
            # the engine reads a token when it is asked for the next one, which may never happen
            self._pending = [token, *self.prompt.next_ids()]
            turn.ids.append(token)
            turn.seconds = time.perf_counter() - started
            turn.first_token = turn.first_token or turn.seconds
            if piece := stream.step(backend, token):
                turn.answer += piece
                yield piece
        turn.seconds = time.perf_counter() - started
        turn.stopped = ""
        if turn.tokens < limit:
            self._pending = self.prompt.next_ids()
        else:
            turn.stopped = "max-tokens" if limit == sampling.max_tokens else "context"
        if rest := self._rest(turn.ids, turn.answer):
            turn.answer += rest
            yield rest

    def _rest(self, ids: list[int], text: str) -> str:
        """What the stream still holds back when an answer ends in the middle of a character: one U+FFFD."""
        whole = self.loaded.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        return whole[len(text) :] if whole.startswith(text) else ""

    def length(self, turns: Sequence[Said]) -> int:
        """Tokens that `replay` will read."""
        between = len(self.prompt.next_ids())
        texts = [self._turn_ids(said) for said in turns]
        return sum(map(len, texts)) + between * max(0, len(turns) - 1)

    def replay(self, turns: Sequence[Said]) -> Generator[Usage]:
        """Read an earlier conversation (questions and answers) into the cache, yielding the measured usage.

        Left early, the turns that were read whole stay. Raises DoesNotFit where the next one has no room.
        """
        for said in turns:
            turn = Turn(said.question, said.answer, self._answer_ids(said), said.context)
            if (
                self.engine.tokens + len(self._pending) + len(self._turn_ids(said)) + ANSWER_ROOM
                > self.context
            ):
                raise DoesNotFit(
                    f"the earlier conversation does not fit the {self.context:,} tokens that {self.loaded.name} reads"
                )
            yield from self._read_turn(turn)

    def put_back(self, turn: Turn) -> None:
        """Bring a turn back that `undo` took; its answer is read, not made anew."""
        for _ in self._read_turn(turn):
            pass

    def _read_turn(self, turn: Turn) -> Generator[Usage]:
        turn._mark, turn._pending = self.engine.cache.snapshot(), self._pending
        try:
            for _ in self.engine.prefill(self._pending + self._turn_ids(turn)):
                yield self.usage()
        except BaseException:
            self.engine.cache.restore(turn._mark)
            raise
        self.turns.append(turn)
        self._pending = self.prompt.next_ids()

    def _turn_ids(self, turn: Turn | Said) -> list[int]:
        return self.prompt.question_ids(turn.context + turn.question) + self._answer_ids(turn)

    def _answer_ids(self, said: Turn | Said) -> list[int]:
        """The tokens that were generated, unless another model's tokenizer made them."""
        decoded = self.loaded.tokenizer.backend_tokenizer.decode(said.ids, skip_special_tokens=False)
        return said.ids if said.ids and decoded == said.answer else self.prompt.text_ids(said.answer)

    def undo(self) -> Turn | None:
        """Take the last turn back, exactly; returns it, or None where there is none."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.engine.cache.restore(turn._mark)
        self._pending = turn._pending
        return turn

    def clear(self) -> None:
        """Forget the conversation; the documents stay read."""
        if self._start is not None:
            self.engine.cache.restore(self._start)
        self.turns, self._pending = [], []

    def _new_engine(self, chunk: int | None, segment: int) -> Engine:
        engine = Engine(self.loaded.model, self.fmt, chunk, segment, self.calibration)
        engine.cache.reserve(len(self.prefix))
        return engine

    def _open_entry(self, store: Store, refresh: bool) -> Entry:
        loaded, engine = self.loaded, self.engine
        precision = str(loaded.dtype).removeprefix("torch.")
        depends = fingerprint(loaded.folder)
        if self.calibration is not None:
            depends["calibration"] = self.calibration.digest
        key = Key.of(depends, self.fmt, precision, engine.chunk, engine.segment)
        planned = self.usage(len(self.prefix)).in_use
        return Entry(
            store, key, self.prefix, self._ends, self.documents, loaded.name, self.fmt.name, planned, refresh
        )

    def _check_fits(self) -> None:
        needed = len(self.prefix) + ANSWER_ROOM
        check_context(self.loaded.name, len(self.prefix), self.context)
        free = free_bytes(self.loaded.device)
        planned = self.usage(needed)
        if planned.in_use > free:
            dense = self.loaded.dtype.itemsize
            fitting = [
                name for name, f in PRESETS.items() if fits(self.loaded.shape, f, dense, free) >= needed
            ]
            advice = f"--kv {fitting[0]} would fit" if fitting else "no format would fit; give fewer files"
            raise DoesNotFit(
                f"{self.fmt.name} needs {human(planned.in_use)} for {needed:,} tokens and {human(free)} are free; {advice}"
            )
