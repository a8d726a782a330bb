"""Predict the tide from a handful of harmonic constituents."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

REFERENCE = datetime(2020, 1, 1, tzinfo=UTC)
MEAN_LEVEL_MM = 3120
STEP_MINUTES = 5
LEAD_HOURS = 9  # calculated on both sides so that no turn is at an end
SWING_MM = 280


@dataclass(frozen=True)
class Constituent:
    name: str
    speed: float  # degrees an hour
    amplitude_mm: float
    phase: float  # degrees at REFERENCE


# Fitted to two years of levels at the ferry steps.
CONSTITUENTS = (
    Constituent("M2", 28.984104, 1846.0, 112.5),
    Constituent("S2", 30.000000, 604.0, 158.0),
    Constituent("N2", 28.439730, 371.0, 87.3),
    Constituent("K1", 15.041069, 96.0, 201.4),
    Constituent("O1", 13.943036, 83.0, 340.9),
)


def height(time):
    """The predicted level in millimetres above chart zero."""
    hours = (time - REFERENCE).total_seconds() / 3600
    return MEAN_LEVEL_MM + sum(
        c.amplitude_mm * math.cos(math.radians(c.speed * hours - c.phase)) for c in CONSTITUENTS
    )


def curve(start, hours):
    """(time, level) every STEP_MINUTES from start."""
    steps = int(hours * 60 / STEP_MINUTES) + 1
    times = (start + timedelta(minutes=STEP_MINUTES * i) for i in range(steps))
    return [(time, height(time)) for time in times]


def turning_points(levels, swing_mm=SWING_MM):
    """The ('high' or 'low', time, level) points of a list of (time, level).

    A turn counts once the level has come back from it by swing_mm, so that a
    ripple is not taken for a tide. The two ends of the list are not turns.
    """
    points, rising, high, low = [], None, None, None
    for point in levels:
        if high is None or point[1] > high[1]:
            high = point
        if low is None or point[1] < low[1]:
            low = point
        if rising is not False and high[1] - point[1] >= swing_mm:
            if rising:
                points.append(("high", *high))
            rising, low = False, point
        elif rising is not True and point[1] - low[1] >= swing_mm:
            if rising is False:
                points.append(("low", *low))
            rising, high = True, point
    return points


def tides(start, hours):
    """The predicted turning points of the hours from start."""
    lead = timedelta(hours=LEAD_HOURS)
    points = turning_points(curve(start - lead, hours + 2 * LEAD_HOURS))
    return [p for p in points if start <= p[1] < start + timedelta(hours=hours)]
