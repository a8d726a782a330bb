"""The command line: record, predict, report, check."""

import argparse
import sys
from datetime import UTC, datetime, timedelta

from . import __version__, config, report
from .alarm import FloodAlarm, State, is_stale
from .filters import LevelFilter
from .frames import FrameReader
from .predict import tides
from .store import LevelStore

CHUNK_BYTES = 4096
EXIT_BAD_CONFIG = 2
EXIT_ALARM = 3


def record(settings, store, args):
    reader, levels = FrameReader(), LevelFilter(settings)
    with open(args.capture, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            for reading in reader.feed(chunk):
                if reading.ident != settings.station.ident:
                    continue
                level = levels.push(reading.level_mm)
                if level is not None:
                    store.add(reading.ident, reading.time, level)
    store.flush()
    store.prune(settings.store.keep_days, args.now)
    print(
        f"{reader.lost_frames} frames lost, {levels.spikes.rejected} spikes, "
        f"{reader.skipped_bytes} bytes skipped"
    )
    return 0


def predict(settings, store, args):
    for kind, time, level in tides(args.now, args.hours):
        print(f"{kind:4} {time:%Y-%m-%d %H:%M} {report.metres(level)}")
    return 0


def show_report(settings, store, args):
    start = args.now - timedelta(days=args.days)
    for line in report.lines(store.between(settings.station.ident, start, args.now)):
        print(line)
    return 0


def check(settings, store, args):
    ident = settings.station.ident
    if is_stale(store.latest(ident), args.now):
        state = State.STALE
    else:
        alarm = FloodAlarm(settings.alarm)
        for time, level in store.between(ident, args.now - timedelta(hours=8), args.now):
            alarm.update(time, level)
        state = alarm.state
    print(f"{settings.station.name}: {state.value}")
    return 0 if state is State.CALM else EXIT_ALARM


def parser():
    top = argparse.ArgumentParser(prog="tidegauge", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    top.add_argument("--config", help="the settings file")
    top.add_argument("--now", type=datetime.fromisoformat, help="pretend that it is this time")
    commands = top.add_subparsers(required=True)
    command = commands.add_parser("record", help="decode a capture and store its levels")
    command.add_argument("capture")
    command.set_defaults(run=record)
    command = commands.add_parser("predict", help="print the tides to come")
    command.add_argument("--hours", type=float, default=36)
    command.set_defaults(run=predict)
    command = commands.add_parser("report", help="print the tides that were")
    command.add_argument("--days", type=int, default=3)
    command.set_defaults(run=show_report)
    command = commands.add_parser("check", help="say whether an alarm is up")
    command.set_defaults(run=check)
    return top


def main(argv=None):
    args = parser().parse_args(argv)
    args.now = args.now or datetime.now(UTC)
    if args.now.tzinfo is None:
        args.now = args.now.replace(tzinfo=UTC)
    try:
        settings = config.load(args.config)
    except config.ConfigError as error:
        print(f"tidegauge: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    store = LevelStore(settings.store.path)
    try:
        return args.run(settings, store, args)
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())
