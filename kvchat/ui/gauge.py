"""The live gauge: bytes in use (measured) beside what fp16 would take for the same tokens, while a document is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvchat.errors import Interrupted
from kvchat.memory import Usage, human
from kvchat.ui.interrupt import Interrupt
from kvchat.ui.screen import Screen

REDRAWS_A_SECOND = 4
BAR = 24
WIDTH = 64  # columns that the gauge needs


def summary(usage: Usage) -> str:
    """One usage in a line, as in the REPL's toolbar and the statistics."""
    return (
        f"{usage.format_name} {usage.true_bits:.3g} bits: {human(usage.in_use)} in use, "
        f"fp16 would be {human(usage.fp16)} ({usage.ratio:.1f}x)"
    )


def watch(usages: Generator[Usage], total: int, screen: Screen, free: Callable[[], int], device: str) -> None:
    """Pull a prefill to its end and show how it goes: a gauge on a terminal, a line each tenth in a pipe.

    Raises Interrupted, which says how far it came, after a first Ctrl-C.
    """
    meter = _Meter(total, free, device)
    if screen.quiet:
        steps = meter.steps(usages)
    else:
        steps = (_live if screen.fancy and screen.console.width >= WIDTH else _lines)(meter, usages, screen)
    with Interrupt() as interrupt, closing(usages), closing(steps):
        for usage in steps:
            if interrupt.requested and usage.tokens < total:
                raise Interrupted(f"stopped after {usage.tokens:,} of {total:,} tokens")


class _Meter:
    def __init__(self, total: int, free: Callable[[], int], device: str):
        self.total, self.free, self.device = total, free, device
        self.started = self.first = 0.0  # when, and with how many tokens, this watch began
        self.usage: Usage | None = None

    def steps(self, usages: Iterator[Usage]) -> Generator[Usage]:
        for usage in usages:
            if self.usage is None:
                self.started, self.first = time.perf_counter(), usage.tokens
            self.usage = usage
            yield usage

    def pace(self) -> str:
        """Speed since the first step, which a stored cache or an earlier watch may have brought."""
        assert self.usage is not None
        read, seconds = self.usage.tokens - self.first, time.perf_counter() - self.started
        if not read or not seconds:
            return "done" if self.usage.tokens == self.total else "measuring the speed"
        speed = read / seconds
        return f"{speed:,.0f} tokens/s, {_clock((self.total - self.usage.tokens) / speed)} left"


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _bar(share: float, style: str) -> Text:
    filled = round(max(0.0, min(1.0, share)) * BAR)
    return Text("█" * filled, style=style) + Text("░" * (BAR - filled), style="dim")


def _view(meter: _Meter) -> Group:
    usage = meter.usage
    assert usage is not None
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        "read", _bar(usage.tokens / meter.total, "cyan"), f"{usage.tokens:,} of {meter.total:,} tokens"
    )
    grid.add_row("", "", meter.pace())
    grid.add_row(
        "in use",
        _bar(usage.in_use / usage.fp16, "green"),
        f"{human(usage.in_use)}, measured: {usage.format_name}",
    )
    grid.add_row("", "", f"{usage.true_bits:.3g} true bits" + " and the window" * (usage.true_bits < 16))
    grid.add_row("fp16", _bar(1.0, "red"), f"{human(usage.fp16)} would be, {usage.ratio:.1f}x as much")
    grid.add_row("free", "", f"{human(meter.free())} on {meter.device}")
    return Group(grid)


def _live(meter: _Meter, usages: Iterator[Usage], screen: Screen) -> Generator[Usage]:
    with Live(console=screen.console, auto_refresh=False) as live:
        drawn = 0.0
        for usage in meter.steps(usages):
            now = time.perf_counter()
            if now - drawn > 1 / REDRAWS_A_SECOND or usage.tokens >= meter.total:
                live.update(_view(meter), refresh=True)
                drawn = now
            yield usage


def _lines(meter: _Meter, usages: Iterator[Usage], screen: Screen) -> Generator[Usage]:
    told, usage, said = -1, None, True
    for usage in meter.steps(usages):
        tenth = usage.tokens * 10 // meter.total
        said = tenth > told
        if said:
            told = tenth
            _say(meter, usage, screen)
        yield usage
    if usage is not None and not said:
        _say(meter, usage, screen)  # the state after the last step, sealed


def _say(meter: _Meter, usage: Usage, screen: Screen) -> None:
    screen.say(
        f"reading {usage.tokens:,}/{meter.total:,} tokens, {meter.pace()}; {summary(usage)}; "
        f"{human(meter.free())} free on {meter.device}"
    )
