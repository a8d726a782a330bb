"""The conversation at the prompt: what each line means. Reading lines is the business of `ui.repl`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat import steps
from kvchat.answering import look
from kvchat.conversations import Conversation, Said, forget
from kvchat.documents import Reading
from kvchat.errors import DoesNotFit, Interrupted, KVChatError, UsageError
from kvchat.kv.format import KVFormat, parse
from kvchat.memory import human
from kvchat.passages import Reread
from kvchat.quotes import Check
from kvchat.ui import citations
from kvchat.ui.gauge import summary
from kvchat.ui.screen import Screen
from kvchat.ui.tables import table

if TYPE_CHECKING:
    from kvchat.engine import Sampling
    from kvchat.models.load import LoadedModel
    from kvchat.session import Session
    from kvchat.store import Store

HELP = {
    "/help": "this list",
    "/exit": "leave (also Ctrl-D)",
    "/clear": "forget the conversation, keep the documents",
    "/add": "PATH: read another file or folder (the documents are read anew)",
    "/files": "the documents, and what was skipped",
    "/tokens": "tokens of each document and what is left",
    "/memory": "bytes of the cache, measured, and what fp16 would be",
    "/set": "NAME VALUE: temp, top-p, seed, max-tokens or kv",
    "/cite": "what the last answer quotes, names and counts, and where that stands",
    "/source": "N: the page, or the lines, around number N of /cite",
    "/regen": "answer the last question again",
    "/save": "FILE: write the conversation as Markdown",
    "/system": "TEXT: another instruction (the documents are read anew)",
}
ALONE = {"/help", "/exit", "/clear", "/files", "/tokens", "/memory", "/cite", "/regen"}
ALIASES = {"/?": "/help", "/quit": "/exit", "/bye": "/exit"}


@dataclass
class Chat:
    """State of one chat. `line` handles what was typed; a document that wasn't read to its end is read on when asked about."""

    loaded: LoadedModel
    fmt: KVFormat
    documents: steps.Documents
    reading: Reading
    sampling: Sampling
    system: str | None
    screen: Screen
    store: Store | None
    reread: Reread
    refresh: bool = False
    keep: bool = True  # the conversation, for `chat -c`

    def __post_init__(self) -> None:
        self.session = self._open(self.fmt, self.reading, self.system, self.refresh)
        self.done = False
        self.earlier: list[Said] = []  # turns of an earlier conversation that are still to be read
        self.unseen: list[Said] = []  # those that have no room, after the first `seen` turns
        self.seen = 0

    def _open(self, fmt: KVFormat, reading: Reading, system: str | None, refresh: bool = False) -> Session:
        return steps.open_session(self.loaded, fmt, reading, system, self.screen, self.store, refresh)

    def prefill(self) -> None:
        """Read the documents. A Ctrl-C leaves them half read, and says so."""
        try:
            steps.prefill(self.session, self.screen)
        except Interrupted as error:
            self.screen.warn(f"{error}; the next question goes on from there")
        else:
            if self.session.documents:
                self.screen.say(steps.reading_statistics(self.session))

    def resume(self, turns: Sequence[Said]) -> None:
        """Go on with an earlier conversation about these documents: now, or with the next question where it is stopped."""
        self.earlier = list(turns)
        if not self.session.unread:
            self._bring_back()

    def _bring_back(self) -> None:
        """Read the earlier turns. Those that do not fit stay in the kept conversation, out of the model's sight."""
        before = len(self.session.turns)
        try:
            steps.replay(self.session, self.earlier, self.screen)
            stays = 0
        except Interrupted as error:
            self.screen.warn(f"{error}; the next question goes on from there")
            stays = len(self.earlier) - (len(self.session.turns) - before)
        except DoesNotFit as error:
            back = len(self.session.turns) - before
            self.unseen, self.seen = self.earlier[back:], len(self.session.turns)
            self.screen.warn(
                f"{error}; {len(self.unseen)} turns are kept on disk, but the model does not see them"
            )
            stays = 0
        self.earlier = self.earlier[len(self.earlier) - stays :]

    def toolbar(self) -> str:
        usage = self.session.usage()
        free = f"{human(self.session.free_bytes())} free on {self.loaded.device}"
        return f" {summary(usage)}\n {usage.tokens:,} of {self.session.context:,} tokens, {free}"

    def line(self, text: str) -> None:
        """A question or a command. Errors are said; the chat goes on."""
        text = text.strip()
        if not text:
            return
        try:
            command = self._command(text)
            if command is not None:
                command()
            else:
                self._ask(text.removeprefix("/") if text.startswith("//") else text)
        except KVChatError as error:
            self.screen.warn(f"kvchat: {error}")

    def _command(self, text: str) -> Callable[[], None] | None:
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        name = ALIASES.get(word.lower(), word.lower())
        if name in HELP:
            if rest and name in ALONE:
                raise UsageError(f"{name} takes nothing after it")
            method = getattr(self, "_" + name.removeprefix("/"))
            return lambda: method(rest)
        if not word.startswith("/") or word.startswith("//") or "/" in word[1:]:
            return None  # a path, say, or // to escape a slash
        near = difflib.get_close_matches(word.lower(), [*HELP, *ALIASES], 1, 0.6)
        if near or not rest:
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise UsageError(f"unknown command {word}; {hint} (// starts a question with a slash)")
        return None

    def _ask(self, question: str) -> None:
        if self.session.unread:
            self.prefill()
        if self.session.unread:
            return
        if self.earlier:
            self._bring_back()
        if self.earlier:
            return
        answered = steps.answer(self.session, question, self.sampling, self.reread, self.screen)
        citations.say(answered.last.checks, self.screen)
        self.screen.say(steps.answer_statistics(self.session, answered.last.turn))
        steps.explain_stop(answered, self.screen)
        if self.keep:
            self._conversation().save()

    def _conversation(self) -> Conversation:
        turns = [Said(t.question, t.answer, t.ids, t.context) for t in self.session.turns]
        turns[self.seen : self.seen] = self.unseen
        return Conversation.about(
            self.documents.paths, self.documents.options, self.system, self.session.stored, turns
        )

    def _reopen(
        self,
        *,
        documents: steps.Documents | None = None,
        fmt: KVFormat | None = None,
        system: str | None = None,
    ) -> None:
        """Open anew with something changed; where that fails, everything stays as it was."""
        documents, fmt = documents or self.documents, fmt or self.fmt
        reading = self.reading
        if documents is not self.documents:
            reading = steps.read_documents(documents, self.screen)
        session = self._open(fmt, reading, self.system if system is None else system)
        self.session.close()
        self.session, self.documents, self.reading, self.fmt = session, documents, reading, fmt
        self.system = self.system if system is None else system
        self.earlier, self.unseen = [], []
        self.screen.say("the conversation starts anew")
        self.prefill()

    def _help(self, _: str) -> None:
        self.screen.show(table(["command", ""], list(HELP.items())))
        self.screen.show('Alt-Enter or Ctrl-J: new line; """ opens and closes a block; Ctrl-X Ctrl-E: editor')

    def _exit(self, _: str) -> None:
        self.done = True

    def _clear(self, _: str) -> None:
        self.session.clear()
        self.earlier, self.unseen = [], []
        forget(self.documents.paths)
        self.screen.say("the conversation is forgotten; the documents stay")

    def _add(self, path: str) -> None:
        if not path:
            raise UsageError("/add needs the path of a file or folder")
        paths = [*self.documents.paths, str(Path(path).expanduser())]
        self._reopen(documents=replace(self.documents, paths=paths))

    def _files(self, _: str) -> None:
        rows = [[d.name, f"{len(d.text):,}"] for d in self.reading.documents]
        self.screen.show(
            table(["document", "characters"], rows) if rows else "no documents; /add PATH reads one"
        )
        for skipped in self.reading.skipped:
            self.screen.show(f"skipped {skipped.name}: {skipped.reason}")

    def _tokens(self, _: str) -> None:
        prompt = self.session.prompt
        rows = [[d.name, f"{len(prompt.text_ids(d.text)):,}"] for d in self.reading.documents]
        used = self.session.usage().tokens
        rows += [["everything in the cache", f"{used:,}"], ["left", f"{self.session.context - used:,}"]]
        self.screen.show(table(["", "tokens"], rows))

    def _memory(self, _: str) -> None:
        usage = self.session.usage()
        rows = [
            ["in use (measured)", human(usage.in_use)],
            ["reserved (measured)", human(self.session.reserved_bytes)],
            ["fp16 would be", human(usage.fp16)],
            ["ratio", f"{usage.ratio:.2f}x"],
            ["true bits of a packed element", f"{usage.true_bits:.3g}"],
            [f"free on {self.loaded.device}", human(self.session.free_bytes())],
        ]
        self.screen.show(table([f"cache of {usage.tokens:,} tokens, {usage.format_name}", ""], rows))

    def _set(self, setting: str) -> None:
        name, _, value = setting.partition(" ")
        fields = {
            "temp": ("temperature", float),
            "top-p": ("top_p", float),
            "seed": ("seed", int),
            "max-tokens": ("max_tokens", int),
        }
        if name == "kv":
            self._reopen(fmt=parse(value.strip()))
            return
        if name not in fields:
            raise UsageError("/set takes temp, top-p, seed, max-tokens or kv, and a value")
        attribute, kind = fields[name]
        try:
            self.sampling = replace(self.sampling, **{attribute: kind(value)})
        except ValueError:
            raise UsageError(f"{value!r} is no value for {name}; it takes a number") from None
        self.screen.say(f"{name} is {value.strip()}")

    def _checks(self) -> list[Check]:
        if not self.session.turns:
            raise UsageError("there is no answer yet; ask a question")
        checks = look(self.session, self.session.turns[-1]).checks
        if not checks:
            raise UsageError(
                "the last answer has no quote, number or name to look up; ask for the passage itself"
            )
        return checks

    def _cite(self, _: str) -> None:
        self.screen.show(citations.view(self._checks()), fold=False)

    def _source(self, number: str) -> None:
        checks = self._checks()
        chosen = dict(zip(map(str, range(1, len(checks) + 1)), checks, strict=True)).get(number)
        if chosen is None:
            raise UsageError(f"/source takes a number from 1 to {len(checks)}; /cite lists them")
        if chosen.passage is None:
            raise UsageError(f"{number} is not in the document, nor is anything like it; /cite lists what is")
        self.screen.show(citations.source(chosen.passage), fold=False)

    def _regen(self, _: str) -> None:
        turn = self.session.undo()
        if turn is None:
            raise UsageError("there is no question to answer again; ask one")
        if self.sampling.temperature == 0:
            self.screen.say("at temperature 0 the answer will be the same; /set temp 0.7 changes that")
        self._ask(turn.question)

    def _save(self, path: str) -> None:
        if not path:
            raise UsageError("/save needs a file name")
        target = Path(path).expanduser()
        turns = [
            f"## {t.question}\n\n{t.answer}{' (stopped)' * bool(t.stopped)}\n" for t in self.session.turns
        ]
        names = steps.join_names([d.name for d in self.reading.documents]) or "no document"
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(f"# kvchat: {names}\n\n" + "\n".join(turns))
        except FileExistsError:
            raise UsageError(f"{target} exists already; choose another name") from None
        except OSError as error:
            raise KVChatError(f"cannot write {target}: {error.strerror}; choose another place") from None
        self.screen.say(f"wrote {len(turns)} turns to {target}")

    def _system(self, text: str) -> None:
        if not text:
            self.screen.show(self.session.prompt.system)
            return
        self._reopen(system=text)
