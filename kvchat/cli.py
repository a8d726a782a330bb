"""The commands: parse, call, print. The one place that catches KVChatError and sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from kvchat import __version__, about, caches, calibrations, flags, places, steps
from kvchat.arguments import question_from_stdin, split_arguments
from kvchat.conversations import last
from kvchat.documents import Reading
from kvchat.errors import Interrupted, KVChatError, UsageError
from kvchat.flags import AnswerFlags, CacheFlags, DocumentFlags, FormatFlags, ModelFlags, ScreenFlags
from kvchat.kv.format import PRESETS, parse
from kvchat.models.find import DEFAULT
from kvchat.quotes import require_verified
from kvchat.ui import citations
from kvchat.ui.gauge import summary
from kvchat.ui.screen import Screen

ABOUT = "What is this document about?"


class Commands(typer.core.TyperGroup):
    """The commands, from which a Ctrl-C comes out as an error that says so (typer would leave in silence)."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Ask whole books and codebases. The document goes into one long context; its keys and values are kept in 2, 3 "
    "or 4 bits, and a gauge compares that with fp16.",
)
app.add_typer(about.app, name="models")
app.add_typer(caches.app, name="cache")


def main() -> None:
    """Run the command line. Every error that is caught here ends in one line and its exit code."""
    try:
        sys.exit(_run())
    except KVChatError as error:
        Screen().warn(f"kvchat: {'' if isinstance(error, Interrupted) else 'error: '}{error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # the reader has gone: nothing to say, and nothing that closing stdout could still flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        what = error.filename or "the output"
        Screen().warn(f"kvchat: error: {what}: {error.strerror}; mend that and try again")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run() -> int:
    """Raises UsageError where typer would draw a box of several lines."""
    try:
        return app(standalone_mode=False) or 0
    except Exception as error:  # typer carries its own copy of click, whose errors are not importable
        if not hasattr(error, "format_message"):
            raise
        message, context = error.format_message(), getattr(error, "ctx", None)
    if context is None:
        raise UsageError(message)
    if not message:  # no command was named, and the help has been shown
        return 2
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    raise UsageError(f"{message.rstrip('.')}; see {' '.join(['kvchat', *names])} --help")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"kvchat {__version__}")
        raise typer.Exit
    group: Any = context.command
    commands = {name: command for name, command in group.commands.items() if name not in ("models", "cache")}
    try:
        context.default_map = flags.defaults(commands, context)
    except KVChatError as error:
        if context.invoked_subcommand != "doctor":  # which helps to mend it
            raise
        Screen().warn(f"kvchat: {error}")
    if context.invoked_subcommand is None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            print(context.get_help())
            raise typer.Exit(2)
        with commands["chat"].make_context("chat", [], parent=context) as chat_context:
            commands["chat"].invoke(chat_context)


@app.command()
@flags.grouped
def ask(
    models: ModelFlags,
    formats: FormatFlags,
    document_flags: DocumentFlags,
    stores: CacheFlags,
    answers: AnswerFlags,
    screens: ScreenFlags,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH... [QUESTION]", help="What to read, then the question.", show_default=False
        ),
    ] = None,
    file: flags.File = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            envvar="KVCHAT_STRICT",
            rich_help_panel=flags.ANSWER,
            help="Exit 6 unless all that the answer quotes is in the document.",
        ),
    ] = False,
    as_json: flags.Json = False,
) -> None:
    """Answer one question about files and folders.

    kvchat ask book.pdf "When was the bridge built?"
    """
    paths, question = split_arguments(arguments or [], file or [])
    documents = steps.Documents(paths, document_flags.options())
    if question is None:
        if sys.stdin.isatty() and "-" not in paths and not (as_json or strict):
            _talk(
                documents, models, formats, stores, answers, screens, vi=False, history=places.history_file()
            )
            return
        question = question_from_stdin(paths)
    fmt, store, screen = parse(formats.kv), stores.store(), screens.screen()
    reading = steps.read_documents(documents, screen, screens.verbose)
    loaded = steps.open_model(models, reading, screen, screens.verbose)
    session = steps.open_session(loaded, fmt, reading, answers.system, screen, store, stores.refresh)
    sampling = steps.sampling(answers)
    session.check(question, sampling)
    steps.prefill(session, screen)
    asked = steps.answer(session, question, sampling, answers.reread, screen, shown=not as_json)
    if as_json:
        print(json.dumps(steps.report(asked, reading), ensure_ascii=False))
    else:
        citations.say(asked.last.checks, screen)
        screen.say(steps.statistics(session, asked.last.turn))
    steps.explain_stop(asked, screen)
    if asked.interrupted:
        raise typer.Exit(130)
    if strict:
        require_verified(asked.last.checks)


@app.command()
@flags.grouped
def chat(
    models: ModelFlags,
    formats: FormatFlags,
    document_flags: DocumentFlags,
    stores: CacheFlags,
    answers: AnswerFlags,
    screens: ScreenFlags,
    arguments: flags.Paths = None,
    file: flags.File = None,
    vi: Annotated[bool, typer.Option("--vi", envvar="KVCHAT_VI", help="vi keys at the prompt.")] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep neither what is typed nor the conversation.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "-c", "--continue", help="Go on with the last conversation about these files, or of all."
        ),
    ] = False,
) -> None:
    """Talk about files and folders, or about nothing. /help lists the commands."""
    documents = steps.Documents([*(file or []), *(arguments or [])], document_flags.options())
    if "-" in documents.paths:
        raise UsageError("a chat reads its questions from stdin, so - cannot be a document; give a file")
    history = None if no_history else places.history_file()
    _talk(documents, models, formats, stores, answers, screens, vi, history, resume)


def _talk(
    documents: steps.Documents,
    models: ModelFlags,
    formats: FormatFlags,
    stores: CacheFlags,
    answers: AnswerFlags,
    screens: ScreenFlags,
    vi: bool,
    history: Path | None,
    resume: bool = False,
) -> None:
    from kvchat.chat import HELP, Chat
    from kvchat.ui.repl import inputs, typing_ahead

    fmt, store, screen = parse(formats.kv), stores.store(), screens.screen()
    if history is not None:
        places.make(history.parent)  # before a book is read for nothing
    system, earlier = answers.system, last(documents.paths) if resume else None
    if resume and earlier is None:
        about = " about these files" if documents.paths else ""
        raise UsageError(f"there is no conversation{about} to go on with; leave out -c")
    if earlier is None:
        reading = steps.read_documents(documents, screen, screens.verbose)
    else:
        documents = steps.Documents(
            documents.paths or [*earlier.paths], earlier.options_with(documents.options)
        )
        system = earlier.system if system is None else system
        reading = steps.read_again(documents, earlier.cache, store, screen)
    loaded = steps.open_model(models, reading, screen, screens.verbose)
    talk = Chat(
        loaded,
        fmt,
        documents,
        reading,
        steps.sampling(answers),
        system,
        screen,
        store,
        answers.reread,
        stores.refresh,
        keep=history is not None,
    )
    with typing_ahead():
        talk.prefill()
        if earlier is not None:
            talk.resume(earlier.turns)
    names = steps.join_names([d.name for d in reading.documents]) or "no documents"
    screen.say(f"{loaded.name} with {names}; /help lists the commands, Ctrl-D leaves")
    with closing(inputs(HELP, history, talk.toolbar, vi)) as lines:
        for text in lines:
            talk.line(text)
            if talk.done:
                break


@app.command()
@flags.grouped
def ingest(
    models: ModelFlags,
    formats: FormatFlags,
    document_flags: DocumentFlags,
    stores: CacheFlags,
    screens: ScreenFlags,
    arguments: flags.Paths = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count and plan; compute nothing.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Read files now and keep the cache, so that asking starts at once; or say what that would mean.

    kvchat ingest book.pdf    kvchat ingest --dry-run src/
    """
    from kvchat import planning

    if not arguments:
        raise UsageError("there is nothing to read; name files or folders")
    fmt, store, screen = parse(formats.kv), stores.store(), screens.screen()
    if store is None and not dry_run:
        raise UsageError("ingest keeps what it reads; without --no-cache, or with --dry-run")
    documents = steps.Documents(arguments, document_flags.options())
    reading = steps.read_documents(documents, screen, screens.verbose)
    if not dry_run:
        loaded = steps.open_model(models, reading, screen, screens.verbose)
        session = steps.open_session(loaded, fmt, reading, None, screen, store, stores.refresh)
        steps.prefill(session, screen)
        if as_json:
            print(json.dumps(steps.reading_report(session, reading), ensure_ascii=False))
        else:
            screen.say(f"{steps.reading_statistics(session)} · {summary(session.usage())}")
        if not session.stored:
            raise KVChatError("what was read could not be kept, see above; ask reads it again")
        return
    plan = planning.plan(steps.find_config(models, screen), fmt, reading)
    if as_json:
        print(json.dumps(asdict(plan), ensure_ascii=False))
    else:
        for view in planning.plan_views(plan):
            screen.show(view)


@app.command(name="compare-memory")
@flags.grouped
def compare_memory(
    models: ModelFlags,
    document_flags: DocumentFlags,
    screens: ScreenFlags,
    arguments: flags.Paths = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, max=10**12, help="Plan for this many tokens instead of a document."),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="A format to compare, again for more; all presets otherwise."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Read the document in each format and measure.")
    ] = False,
    question: Annotated[
        str | None,
        typer.Option(
            "--question",
            help=f"What --measure asks, to compare the answers.  [default: {ABOUT}]",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the comparison as a PNG.")] = None,
    as_json: flags.Json = False,
) -> None:
    """Compare KV formats for a document or a number of tokens, from the model's configuration alone."""
    from kvchat import planning
    from kvchat.ui import plot as drawing

    if bool(arguments) == (tokens is not None):
        raise UsageError("compare-memory takes either documents or --tokens N")
    if measure and not arguments:
        raise UsageError("--measure needs a document to read")
    if question is not None and not measure:
        raise UsageError("--question is what --measure asks; give both or neither")
    if plot is not None:
        drawing.check(plot)
    formats = [*dict.fromkeys(parse(spec) for spec in kv)] if kv else list(PRESETS.values())
    screen, reading = screens.screen(), None
    if arguments:
        documents = steps.Documents(arguments, document_flags.options())
        reading = steps.read_documents(documents, screen, screens.verbose)
    found = (steps.find_model if measure else steps.find_config)(models, screen)
    comparison = planning.compare(found, formats, reading, tokens)
    if measure and reading is not None:
        comparison = steps.measure_formats(
            comparison, found, models.device, reading, formats, question or ABOUT, screen
        )
    if plot is not None:
        drawing.draw(comparison, plot)
        screen.say(f"drew {plot}")
    if as_json:
        print(json.dumps(asdict(comparison), ensure_ascii=False))
    else:
        for view in planning.comparison_views(comparison):
            screen.show(view)


@app.command()
@flags.grouped
def calibrate(
    screens: ScreenFlags,
    model: Annotated[str, typer.Argument(help="As for --model.")] = DEFAULT,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...", help="Files to calibrate on; a built-in text otherwise.", show_default=False
        ),
    ] = None,
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Pieces of text.")] = calibrations.PIECES,
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Tokens a piece.")] = calibrations.PIECE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Chooses the pieces.")] = 0,
    device: Annotated[str, typer.Option("--device", envvar="KVCHAT_DEVICE")] = "auto",
    offline: Annotated[
        bool, typer.Option("--offline", envvar="KVCHAT_OFFLINE", help="Fetch nothing.")
    ] = False,
) -> None:
    """Measure a model's keys and values, once, for the kvquant formats. Minutes for a small model on a CPU.

    kvchat calibrate smollm2 book.txt
    """
    screen = screens.screen()
    text, source = calibrations.builtin_text, calibrations.BUILTIN
    if texts:
        reading = steps.read_documents(steps.Documents(texts), screen, screens.verbose)
        joined = "\n".join(document.text for document in reading.documents)
        text, source = lambda: joined, steps.join_names([d.name for d in reading.documents])
    loaded = steps.open_model(ModelFlags(model, device, offline), Reading((), ()), screen, screens.verbose)
    calibrations.make(loaded, text(), source, screen, pieces, tokens, seed)
    screen.say(f"{loaded.name} is calibrated on {source}; it holds for kvquant4, kvquant3 and kvquant2")


app.command()(about.doctor)
