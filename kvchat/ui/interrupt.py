"""Ctrl-C, once: stop at the next step and keep what is done. Twice: leave with exit code 130."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType

QUIT_WITHIN = 1.0
"""Seconds within which a second Ctrl-C means to leave, also where the first has been dealt with already."""


class Interrupt:
    """While it is entered, the first SIGINT sets `requested`, which loops look at; the second raises KeyboardInterrupt.

    A step (a chunk, a token) is never torn in two, so that the cache stays whole.
    """

    _last = -math.inf

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

    @classmethod
    def pressed_twice(cls) -> bool:
        """Note a Ctrl-C; whether the one before it was only just pressed."""
        now, last = time.monotonic(), cls._last
        cls._last = now
        return now - last < QUIT_WITHIN

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.pressed_twice()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
