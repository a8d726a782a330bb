"""Write the high and low waters as a plain table."""

from .predict import height, turning_points

SURGE_NOTE_MM = 550


def metres(level_mm):
    return f"{level_mm / 1000:.2f} m"


def lines(levels):
    """The lines of the table: kind, time, level, and the surge over the prediction."""
    yield f"{'':4} {'time (UTC)':16} {'level':>8} {'surge':>8}"
    for kind, time, level in turning_points(levels):
        surge = level - height(time)
        note = "  storm surge" if surge > SURGE_NOTE_MM else ""
        yield f"{kind:4} {time:%Y-%m-%d %H:%M} {metres(level):>8} {surge / 1000:+7.2f} m{note}"
