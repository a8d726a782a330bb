"""Take spikes and waves out of the levels."""

from collections import deque
from statistics import median

SPIKES_BEFORE_RESET = 5


class SpikeFilter:
    """Drops a level that jumps too far from the last good one.

    After SPIKES_BEFORE_RESET such levels in a row the new level is believed:
    the gauge has probably been moved or set again.
    """

    def __init__(self, max_jump_mm):
        self.max_jump_mm = max_jump_mm
        self.last = None
        self.rejected = 0
        self._run = 0

    def accept(self, level_mm):
        if self.last is not None and abs(level_mm - self.last) > self.max_jump_mm:
            self._run += 1
            if self._run < SPIKES_BEFORE_RESET:
                self.rejected += 1
                return False
        self._run = 0
        self.last = level_mm
        return True


class RunningMedian:
    """The median of the last few levels, which flattens waves and wash."""

    def __init__(self, window):
        self.levels = deque(maxlen=window)

    def push(self, level_mm):
        self.levels.append(level_mm)
        return round(median(self.levels))


class LevelFilter:
    """Spikes first, then the running median, then the offset to chart zero."""

    def __init__(self, config):
        self.spikes = SpikeFilter(config.filter.max_jump_mm)
        self.median = RunningMedian(config.filter.window)
        self.offset = config.station.zero_offset_mm

    def push(self, level_mm):
        """The smoothed level in millimetres above chart zero, or None for a spike."""
        if not self.spikes.accept(level_mm):
            return None
        return self.median.push(level_mm) + self.offset
