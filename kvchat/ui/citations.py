"""What became of an answer's quotes: lines under the answer, the list of `/cite`, the page of `/source`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from kvchat.quotes import REPAIRED, VERIFIED, Check, Passage
from kvchat.ui.screen import Screen, clean

SHOWN = 48
"""Characters of a quote that is repeated only to be recognized."""
AROUND = 6
"""Lines of a text file before and after a passage."""


def say(checks: Sequence[Check], screen: Screen) -> None:
    """A numbered line for each, on stderr; only what is not verified under --quiet."""
    for number, check in enumerate(checks, 1):
        (screen.say if check.outcome == VERIFIED else screen.warn)(
            f"{number} {_line(check, _short(check.text))}"
        )


def view(checks: Sequence[Check]) -> Text:
    """The list of `/cite`: the same, with every quote at its full length."""
    lines = [f"{number} {_line(check, _one_line(check.text))}" for number, check in enumerate(checks, 1)]
    return Text(clean("\n".join(lines)))


def source(passage: Passage) -> Text:
    """The pages of a passage, or the lines around it, below a line that says where; the passage itself stands out."""
    text = passage.document.text
    first, last = passage.first.line, passage.last.line
    if first is not None and last is not None:
        lines = text.split("\n")
        low = max(0, first - 1 - AROUND)
        start = sum(len(line) + 1 for line in lines[:low])
        end = start + len("\n".join(lines[low : last + AROUND]))
    else:
        spans = [s for s in passage.document.spans if s.start < passage.end and passage.start < s.end]
        start, end = spans[0].start, spans[-1].end
    view = Text(f"{clean(passage.where)}\n\n", style="bold")
    pieces = (
        (text[start : passage.start], "not bold"),
        (passage.text, "bold reverse"),
        (text[passage.end : end], "not bold"),
    )
    for piece, style in pieces:
        view.append(clean(piece), style=style)
    return view


def _line(check: Check, text: str) -> str:
    if check.passage is None:
        return f"{check.outcome}: {text}"
    many = f" (the first of {check.occurrences:,})" if check.occurrences > 1 else ""
    if check.outcome == VERIFIED:
        return f"verified, {check.passage.where}{many}: {text}"
    its = _one_line(check.passage.text)
    if check.outcome == REPAIRED:
        return f"repaired, {check.passage.where}: {its} · the answer has: {text}"
    return f"{check.outcome}: {text} · nearest, {check.passage.where}: {its}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1].rstrip()}\u2026"
