"""Ctrl-C, once: stop at the next step and keep what is done. Twice: leave with exit code 130."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupt:
    """While it is entered, the first SIGINT sets `requested`, which loops look at; the second raises KeyboardInterrupt.

    A step (a chunk, a token) is never torn in two, so that the cache stays whole.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
