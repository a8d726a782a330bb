"""The tables of ingest, compare-memory, models and doctor, out of plain rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from kvchat.ui.screen import clean

NARROW = 80
"""Columns below which a table whose longest words don't fit side by side becomes a list."""

SHORT = 14
"""Characters up to which a cell is not broken."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str = "") -> RenderableType:
    """A table whose columns are right-aligned where every cell starts with a digit; a list where the terminal is too narrow."""
    return _Rows(
        headings, [[c if isinstance(c, Text) else Text(clean(c)) for c in row] for row in rows], title
    )


@dataclass(frozen=True)
class _Rows:
    headings: Sequence[str]
    rows: Sequence[Sequence[Text]]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        needed = [
            max(_width(text) for text in (heading, *(row[i].plain for row in self.rows)))
            for i, heading in enumerate(self.headings)
        ]
        narrow = options.max_width < NARROW and sum(needed) + 2 * len(needed) > options.max_width
        yield from self._list() if narrow else (self._table(),)

    def _table(self) -> Table:
        view = Table(box=box.SIMPLE_HEAD, title=self.title or None, title_justify="left", pad_edge=False)
        for i, heading in enumerate(self.headings):
            number = all(row[i].plain[:1].isdigit() for row in self.rows)
            view.add_column(heading, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            view.add_row(*row)
        return view

    def _list(self) -> Iterator[Text]:
        """The first cell of each row, and below it the others with their headings."""
        if self.title:
            yield Text(self.title, style="italic")
        for first, *others in self.rows:
            yield Text.assemble("\n", first, style="bold")
            for heading, cell in zip(self.headings[1:], others, strict=True):
                if cell.plain:
                    yield Text.assemble("  ", f"{heading}: " if heading else "", cell)


def _width(text: str) -> int:
    """Columns that a cell should have: all of a number with its unit, the longest word of a sentence."""
    return len(text) if len(text) <= SHORT else max(map(len, text.split()))


def bar(share: float, width: int = 12) -> Text:
    """A horizontal bar for a share of 1; a share above 0 always shows."""
    eighths = max(1 if share > 0 else 0, round(share * width * 8))
    whole, rest = divmod(eighths, 8)
    return Text("█" * whole + " ▏▎▍▌▋▊▉"[rest].strip(), style="green")
