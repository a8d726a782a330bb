"""The tables of ingest, compare-memory, models and doctor, out of plain rows."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from kvchat.ui.screen import clean


def table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str = "") -> Table:
    """A table whose columns are right-aligned where every cell starts with a digit."""
    view = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for i, heading in enumerate(headings):
        number = all(str(row[i])[:1].isdigit() for row in rows)
        view.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        view.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return view


def bar(share: float, width: int = 12) -> Text:
    """A horizontal bar for a share of 1; a share above 0 always shows."""
    eighths = max(1 if share > 0 else 0, round(share * width * 8))
    whole, rest = divmod(eighths, 8)
    return Text("█" * whole + " ▏▎▍▌▋▊▉"[rest].strip(), style="green")
