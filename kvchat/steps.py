"""The steps that commands share, with what they show: read documents, open a model, open a session, answer."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat import calibrations
from kvchat.documents import Options, Reading, Step, read
from kvchat.errors import InputError
from kvchat.flags import AnswerFlags, ModelFlags
from kvchat.kv.format import KVFormat
from kvchat.models import find as models
from kvchat.models.families import context_length, read_config
from kvchat.models.pull import pull
from kvchat.models.tokenizer import FolderTokenizer
from kvchat.models.tokens import check_context, count_tokens
from kvchat.passages import Reread
from kvchat.store.manifest import Unusable
from kvchat.ui.gauge import summary, watch
from kvchat.ui.interrupt import Interrupt
from kvchat.ui.screen import Screen

if TYPE_CHECKING:
    from kvchat.answering import Answering
    from kvchat.conversations import Said
    from kvchat.engine import Sampling
    from kvchat.models.load import LoadedModel
    from kvchat.planning import Comparison
    from kvchat.session import Session, Turn
    from kvchat.store import Store


@dataclass
class Documents:
    """What to read, and how."""

    paths: list[str] = field(default_factory=list)
    options: Options = field(default_factory=Options)
    stdin: bytes | None = None


def read_documents(documents: Documents, screen: Screen, verbose: bool = False) -> Reading:
    """Read every document and say what was skipped or is doubtful. Raises InputError, UsageError."""
    if documents.stdin is None and "-" in documents.paths and not sys.stdin.isatty():
        documents.stdin = sys.stdin.buffer.read()
    reading = _drain(read(documents.paths, documents.options, documents.stdin), screen)
    reasons: dict[str, list[str]] = {}
    for skipped in reading.skipped:
        reasons.setdefault(skipped.reason, []).append(skipped.name)
    for reason, names in reasons.items():
        screen.say(f"skipped {', '.join(names) if verbose else join_names(names)}: {reason}")
    for document in reading.documents:
        for note in document.notes:
            screen.warn(f"{document.name}: {note}")
    return reading


def read_again(documents: Documents, cache: str | None, store: Store | None, screen: Screen) -> Reading:
    """As `read_documents`, for an earlier conversation: where a file has gone, the texts come from the stored cache."""
    try:
        return read_documents(documents, screen)
    except InputError as error:
        stored = store.get(cache) if store and cache else None
        try:
            texts = stored.documents() if stored else ()
        except Unusable:
            texts = ()
        if not texts:
            raise
        screen.warn(f"{error}; all documents are taken as they were when they were stored")
        return Reading(texts, ())


def _drain(steps: Generator[Step, None, Reading], screen: Screen) -> Reading:
    with screen.status("reading") as show:
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value
            if step.unit == "pages":
                show(f"reading {step.name}, page {step.done} of {step.total}")


def find_model(flags: ModelFlags, screen: Screen) -> models.Found:
    """Find the model on this machine; a GGUF file is converted first, once. Raises ModelNotFound, ModelRefused."""
    if models.is_gguf(flags.model):
        for line in pull(flags.model, flags.offline):
            screen.say(line)
    return models.find(flags.model, flags.offline)


def find_config(flags: ModelFlags, screen: Screen) -> models.Found:
    """As `find_model`, for what needs no weights. Raises ModelNotFound, ModelRefused."""
    if models.is_gguf(flags.model):
        return find_model(flags, screen)
    return models.find_config(flags.model, flags.offline)


def open_model(flags: ModelFlags, reading: Reading, screen: Screen, verbose: bool = False) -> LoadedModel:
    """Find the model and load its weights, unless the documents are too long for it anyway.

    Raises ModelNotFound, ModelRefused, DoesNotFit, UsageError.
    """
    found = find_model(flags, screen)
    tokenizer = FolderTokenizer(found.folder)
    if reading.documents:
        _, tokens = count_tokens(tokenizer, reading.documents)
        check_context(found.name, tokens, context_length(read_config(found.folder)))
    with screen.status("opening the model"):
        from kvchat.models.load import load

        loaded = load(found, flags.device, tokenizer)
    gc.freeze()
    gc.enable()  # see kvchat.__main__
    if verbose:
        screen.say(
            f"{loaded.name} on {loaded.device} in {str(loaded.dtype).removeprefix('torch.')}, "
            f"{loaded.context:,} tokens of context"
        )
    return loaded


def open_session(
    loaded: LoadedModel,
    fmt: KVFormat,
    reading: Reading,
    system: str | None,
    screen: Screen,
    store: Store | None,
    refresh: bool = False,
) -> Session:
    """A session that has been checked to fit but has read nothing yet. Raises DoesNotFit."""
    from kvchat.session import Session

    calibration = calibrations.ensure(loaded, fmt, screen)
    session = Session(
        loaded,
        fmt,
        reading.documents,
        system,
        store=store,
        refresh=refresh,
        calibration=calibration,
    )
    for note in session.prompt.frame.notes:
        screen.say(note)
    for note in session.notes():
        screen.warn(note)
    return session


def prefill(session: Session, screen: Screen) -> None:
    """Bring the documents into the cache under the gauge. Raises Interrupted; the next call goes on."""
    try:
        watch(session.read(), len(session.prefix), screen, session.free_bytes, str(session.loaded.device))
    finally:
        for note in session.notes():
            screen.warn(note)


def replay(session: Session, turns: Sequence[Said], screen: Screen) -> None:
    """Bring an earlier conversation back, as far as it fits, and show its last turn. Raises DoesNotFit, Interrupted."""
    total = session.usage().tokens + session.length(turns)
    watch(session.replay(turns), total, screen, session.free_bytes, str(session.loaded.device))
    if session.turns:
        last = session.turns[-1]
        screen.say(f"going on after {len(session.turns)} turns; the last one:")
        screen.say(f">>> {last.question}\n{last.answer}")


def answer(
    session: Session, question: str, sampling: Sampling, reread: Reread, screen: Screen, shown: bool = True
) -> Answering:
    """Answer a question on stdout, or unshown. A first Ctrl-C stops it and keeps what there is.

    On a terminal the text comes as it is made, also the first answer of a question that is asked again. Elsewhere stdout
    holds the one that stands, so that what may be asked again is held back until then.
    """
    from kvchat.answering import Again, Answering

    asked = Answering(session, question, sampling, reread)
    streams = shown and (reread != "auto" or sys.stdout.isatty())
    pieces = asked.pieces()
    with Interrupt() as interrupt:
        for piece in pieces:
            if isinstance(piece, Again):
                screen.end_line()
                screen.say(str(piece))
            elif streams:
                screen.write(piece)
            if interrupt.requested:
                pieces.close()  # which ends the loop
    if shown and not streams:
        screen.write(session.turns[-1].answer)
    screen.end_line()
    if asked.note:
        screen.warn(asked.note)
    elif asked.first_stands:
        screen.say("the first answer stands")
    return asked


def sampling(flags: AnswerFlags) -> Sampling:
    from kvchat.engine import Sampling

    return Sampling(flags.temp, flags.top_p, flags.seed, flags.max_tokens)


def report(asked: Answering, reading: Reading) -> dict[str, Any]:
    """What `ask --json` prints. Bytes, tokens and seconds."""
    read = reading_report(asked.session, reading)
    turn, first = asked.last.turn, asked.first
    reread = {
        "passages": [passage.where for passage in asked.passages],
        "first_answer": first.turn.answer if first else None,
        "taken": not asked.first_stands,
    }
    answered = {
        "answer_tokens": turn.tokens,
        "answer_seconds": turn.seconds,
        "first_token_seconds": turn.first_token,
    }
    return {
        "question": turn.question,
        "answer": turn.answer,
        "quotes": [check.report() for check in asked.last.checks],
        "reread": reread if asked.passages else None,
        "stopped": turn.stopped or None,
        **read,
        "statistics": read["statistics"] | answered,
    }


def reading_report(session: Session, reading: Reading) -> dict[str, Any]:
    """What `ingest --json` prints, and the larger part of `ask --json`. Bytes, tokens and seconds."""
    usage = session.usage()
    return {
        "model": session.loaded.name,
        "kv": asdict(usage) | {"ratio": usage.ratio},
        "documents": [
            {"name": d.name, "characters": len(d.text), "notes": d.notes} for d in reading.documents
        ],
        "skipped": [asdict(skipped) for skipped in reading.skipped],
        "notes": [*session.prompt.frame.notes, *session.cache_notes],
        "cache": session.stored,
        "statistics": {
            "document_tokens": len(session.prefix),
            "cached_tokens": session.restored_tokens,
            "cache_seconds": session.restore_seconds,
            "read_seconds": session.read_seconds,
        },
    }


def measure_formats(
    comparison: Comparison,
    found: models.Found,
    device: str,
    reading: Reading,
    formats: Sequence[KVFormat],
    question: str,
    screen: Screen,
) -> Comparison:
    """Add to a comparison what each format measures, saying which one is at work."""
    from kvchat import measure

    if missing := [fmt for fmt in formats if fmt.calibrated and calibrations.find(found) is None]:
        formats = [fmt for fmt in formats if fmt not in missing]
        screen.warn(
            f"not measured: {', '.join(fmt.name for fmt in missing)}; they need a calibration of {found.name}, "
            f"run: kvchat calibrate {found.name}"
        )
    runs = measure.measure(found, device, reading, formats, question)
    done = []
    with screen.status("measuring"):
        for run in runs:
            done.append(run)
            screen.say(f"measured {run.format_name}")
    return replace(comparison, measured=tuple(done))


def explain_stop(asked: Answering, screen: Screen) -> None:
    """Say it when an answer is not whole."""
    turn, session = asked.last.turn, asked.session
    reasons = {
        "interrupted": "(stopped)",
        "max-tokens": f"the answer was cut after {turn.tokens} tokens; raise --max-tokens for more",
        "context": f"the answer was cut: the model's context of {session.context:,} tokens is full",
    }
    if turn.stopped:
        screen.warn(reasons[turn.stopped])


def statistics(session: Session, turn: Turn) -> str:
    """The one line after `ask`."""
    read = [reading_statistics(session)] if session.documents else []
    return " · ".join([*read, answer_statistics(session, turn)])


def answer_statistics(session: Session, turn: Turn) -> str:
    """The one line after an answer in a chat."""
    return f"{turn.tokens} answered ({turn.tokens_per_second:.1f}/s) · {summary(session.usage())}"


def reading_statistics(session: Session) -> str:
    """Where the documents' tokens came from, and how long that took."""
    cached, parts = session.restored_tokens, []
    if cached:
        parts.append(f"{cached:,} tokens read from cache in {session.restore_seconds:.2f} s")
    if fresh := len(session.prefix) - cached:
        speed = fresh / max(session.read_seconds, 1e-9)
        parts.append(f"{fresh:,} tokens prefilled in {session.read_seconds:.1f} s ({speed:,.0f}/s)")
    return ", ".join(parts)


def exists(path: str) -> bool:
    """Whether a path is there; a question that is too long to be one, or empty, is not."""
    if not path.strip():
        return False
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError):
        return False


def looks_like_path(text: str) -> bool:
    """Whether an argument that is no file was meant as one: no white space, and a slash or an ending."""
    name = text.rsplit("/", 1)[-1]
    dotted = "." in name.strip(".") and not text.endswith("?")
    return not any(c.isspace() for c in text) and ("/" in text or dotted)


def join_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"
