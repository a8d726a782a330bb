"""Decide when the water is too high."""

from datetime import timedelta
from enum import Enum

STALE_AFTER = timedelta(minutes=45)


class State(Enum):
    CALM = "calm"
    WARNING = "warning"
    FLOOD = "flood"
    STALE = "stale"  # no level for so long that nobody can say


class FloodAlarm:
    """A state with memory: it rises after a hold time and falls below a margin."""

    def __init__(self, settings):
        self.settings = settings
        self.hold = timedelta(minutes=settings.hold_minutes)
        self.state = State.CALM
        self._above_since = {}

    def update(self, time, level_mm):
        """Take in one level and return the state that follows."""
        flood = self._held(State.FLOOD, self.settings.flood_mm, time, level_mm)
        warning = self._held(State.WARNING, self.settings.warn_mm, time, level_mm)
        self.state = State.FLOOD if flood else State.WARNING if warning else State.CALM
        return self.state

    def _held(self, state, limit, time, level_mm):
        up = self.state is state or (self.state is State.FLOOD and state is State.WARNING)
        if up:
            limit -= self.settings.clear_mm
        if level_mm < limit:
            self._above_since.pop(state, None)
            return False
        since = self._above_since.setdefault(state, time)
        return up or time - since >= self.hold


def is_stale(latest, now):
    return latest is None or now - latest > STALE_AFTER
