"""Where a person types: prompt-toolkit on a terminal, plain lines from a pipe. Knows nothing of what the lines mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kvchat.ui.interrupt import Interrupt
from kvchat.ui.screen import clean


def inputs(
    commands: Mapping[str, str],
    history: Path | None,
    toolbar: Callable[[], str],
    vi: bool,
    prompt: str = ">>> ",
) -> Generator[str]:
    """Yield what the user enters until end of input. Raises KeyboardInterrupt on two quick Ctrl-C."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        yield from _typed(commands, history, toolbar, vi, prompt)
    else:
        for line in sys.stdin:
            yield line.rstrip("\n")


def _typed(
    commands: Mapping[str, str], history: Path | None, toolbar: Callable[[], str], vi: bool, prompt: str
) -> Generator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if history is not None:
        history.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)) if history is not None else InMemoryHistory(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=_completer(commands),
        complete_while_typing=False,
        multiline=True,
        prompt_continuation="... ",
        key_bindings=_keys(),
        vi_mode=vi,
        enable_open_in_editor=True,
        bottom_toolbar=lambda: clean(toolbar()),
    )
    while True:
        try:
            text = session.prompt(prompt)
        except KeyboardInterrupt:
            if Interrupt.pressed_twice():
                raise
            continue
        except EOFError:
            return
        with typing_ahead():
            yield _unquote(text)


@contextmanager
def typing_ahead() -> Iterator[None]:
    """While something else goes on: what is typed waits, unseen, for the next prompt, and Enter stays Enter.

    A terminal left to itself turns it into a line feed, which at the prompt is Ctrl-J: a new line in the same question.
    """
    if not (sys.stdin.isatty() and find_spec("termios")):
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    waiting = termios.tcgetattr(terminal)
    waiting[0] &= ~termios.ICRNL
    waiting[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(terminal, termios.TCSADRAIN, waiting)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _unquote(text: str) -> str:
    stripped = text.strip()
    if len(stripped) >= 6 and stripped.startswith('"""') and stripped.endswith('"""'):
        return stripped[3:-3].strip("\n")
    return text


def _keys():  # type: ignore[no-untyped-def]  # prompt-toolkit's bindings, imported only on a terminal
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        text = event.current_buffer.text.strip()
        inside = text.startswith('"""') and not (len(text) >= 6 and text.endswith('"""'))
        if inside:
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(commands: Mapping[str, str]):  # type: ignore[no-untyped-def]  # as above
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        """Command names after `/`, paths after a command that takes one."""

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            word, space, rest = text.partition(" ")
            if not space and text.startswith("/"):
                for name, what in commands.items():
                    if name.startswith(text):
                        yield Completion(name, start_position=-len(text), display_meta=what)
            elif word in ("/add", "/save"):
                path = Document(rest, len(rest))
                yield from PathCompleter(expanduser=True).get_completions(path, event)

    return Commands()
