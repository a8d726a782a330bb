"""An answer, what became of its quotes, and a second look at the documents where they are not verified."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from kvchat.engine import Sampling
from kvchat.errors import DoesNotFit
from kvchat.passages import Reread
from kvchat.quotes import MISSING, VERIFIED, Check, Passage
from kvchat.session import Session, Turn

_UNKNOWN = re.compile(
    r"\b(?:document|text|passage|context|book|code|file)s?\b[^.\n]{0,40}(?:\bnot|n['\u2019]t|\bnever)\b"
    r"[^.\n]{0,20}\b(?:say|state|mention|contain|provide|specify|give|include|tell)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Again:
    """That a question is asked once more: why, and with which passages before it."""

    reason: str
    passages: tuple[Passage, ...]

    def __str__(self) -> str:
        return (
            f"{self.reason}: asked again with {', '.join(p.where for p in self.passages)} before the question"
        )


@dataclass
class Looked:
    """An answer and what became of what it claims."""

    turn: Turn
    checks: list[Check]

    @property
    def unknown(self) -> bool:
        """Whether it says that the documents do not say."""
        return bool(_UNKNOWN.search(self.turn.answer))

    @property
    def doubt(self) -> str:
        """Why the documents are worth a second look; empty where they are not."""
        if self.turn.stopped == "interrupted":
            return ""
        if self.unknown:
            return "the answer found nothing"
        failed = sum(check.outcome != VERIFIED for check in self.checks)
        return f"{failed} of {len(self.checks)} not verified" if failed else ""

    @property
    def standing(self) -> int:
        """3 where all that it claims is verified, 2 where some is repaired, 1 where it claims nothing, 0 where something is not
        in the documents."""
        if any(check.outcome == MISSING for check in self.checks):
            return 0
        if self.unknown or not self.checks:
            return 1
        return 3 if all(check.outcome == VERIFIED for check in self.checks) else 2


def look(session: Session, turn: Turn) -> Looked:
    """Look up what an answer claims. The end of one that was stopped may be half a word: it is left out."""
    answer = re.sub(r"\S*\Z", "", turn.answer) if turn.stopped else turn.answer
    return Looked(turn, session.checker.check(answer))


@dataclass
class Answering:
    """A question being answered: `pieces` runs it, and the rest says what has come of it so far."""

    session: Session
    question: str
    sampling: Sampling = field(default_factory=Sampling)
    reread: Reread = "auto"
    passages: tuple[Passage, ...] = ()  # what went before the question, at once or again
    first: Looked | None = None  # where there has been a second answer
    second: Looked | None = None
    interrupted: bool = False
    note: str = ""  # why there is no second answer, where there should be one

    @property
    def last(self) -> Looked:
        """The answer that stands, which is the session's last turn."""
        turn = self.session.turns[-1]
        for looked in (self.first, self.second):
            if looked is not None and looked.turn is turn:
                return looked
        return look(self.session, turn)

    @property
    def first_stands(self) -> bool:
        """Whether the question was asked again, for nothing."""
        return self.first is not None and self.session.turns[-1] is self.first.turn

    def pieces(self) -> Generator[str | Again]:
        """The text of the answer; where the question is asked again, an `Again` and the text of the second answer.

        auto: asked again is what claims something that is not verified, or says that the documents do not say. The passages
        that the question is most likely about go before it, exact and in the window. The second answer takes the first
        one's place where it stands better; one that is verified is never asked again. always: they go before the question at
        once. never: the cache alone answers.
        Left early, the partial answer stays, or the first one where the second is left. Raises DoesNotFit as `Session.ask`.
        """
        try:
            yield from self._pieces()
        except GeneratorExit:
            self.interrupted = True
            raise

    def _pieces(self) -> Generator[str | Again]:
        session = self.session
        if self.reread == "always":
            self.passages = tuple(session.finder.find(self.question))
        yield from session.ask(self.question, self.sampling, context(self.passages))
        first = look(session, session.turns[-1])
        if self.reread != "auto" or not first.doubt:
            return
        self.passages = tuple(session.finder.find(self.question))
        if not self.passages:
            return
        yield Again(first.doubt, self.passages)
        self.first = first
        session.undo()
        before = len(session.turns)
        try:
            yield from session.ask(self.question, self.sampling, context(self.passages))
            self.second = look(session, session.turns[-1])
        except DoesNotFit as error:
            self.note = f"there is no room to ask again: {error}"
        finally:
            if self.second is None or self.second.standing <= first.standing:
                if len(session.turns) > before:
                    session.undo()
                session.put_back(first.turn)


def context(passages: Sequence[Passage]) -> str:
    """What goes before a question: the passages as they stand in the documents, the best one last."""
    return "".join(f"{passage.text}\n" for passage in passages) + "\n" * bool(passages)
