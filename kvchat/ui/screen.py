"""`Screen`: stdout carries answers, stderr everything else; nothing fancy unless stderr is a terminal that wants it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text that cannot drive a terminal: control characters but newline and tab, and those that turn the direction of
    writing around, become U+FFFD."""
    return CONTROLS.sub("\ufffd", text)


class Screen:
    """Where a command writes. `fancy` is whether stderr may hold colours and things that redraw themselves."""

    def __init__(self, plain: bool = False, quiet: bool = False):
        dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        self.fancy = sys.stderr.isatty() and not (plain or dumb)
        self.quiet = quiet
        self._open_line = False
        self.console = Console(
            stderr=True,
            highlight=False,
            markup=False,
            emoji=False,
            color_system="auto" if self.fancy else None,
        )
        # what a stream cannot encode: in an answer it shows as \\u2014, elsewhere it is ornament
        for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stderr, "replace")):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors=errors)

    def say(self, line: str, style: str = "dim") -> None:
        """A line about what is going on; silent under --quiet."""
        if not self.quiet:
            self.console.print(Text(clean(line), style=style), soft_wrap=True)

    def warn(self, line: str) -> None:
        """A line that the user must not miss; --quiet does not hide it."""
        self.console.print(Text(clean(line), style="yellow"), soft_wrap=True)

    def show(self, view: RenderableType, fold: bool = True) -> None:
        """A table or the like, which is what was asked for: on stdout, as wide as the terminal or as it needs in a pipe.
        fold: whether longer lines are divided in a pipe, too."""
        on_terminal = sys.stdout.isatty()
        width = None if on_terminal else 160
        color = self.fancy and on_terminal
        Console(
            width=width, highlight=False, markup=False, emoji=False, color_system="auto" if color else None
        ).print(view, soft_wrap=not (fold or on_terminal))

    @contextmanager
    def status(self, line: str) -> Iterator[Callable[[str], None]]:
        """A line that says what is going on while it goes on, on a terminal; gives a function that changes it."""
        if not self.fancy or self.quiet:
            yield lambda line: None
            return
        with self.console.status(Text(clean(line))) as status:
            yield lambda line: status.update(Text(clean(line)))

    def write(self, piece: str) -> None:
        """Write a piece of an answer to stdout as it comes, exactly, but for control characters."""
        sys.stdout.write(clean(piece))
        sys.stdout.flush()
        self._open_line = not piece.endswith("\n")

    def end_line(self) -> None:
        """End the line on stdout, unless it has ended."""
        if self._open_line:
            self.write("\n")
