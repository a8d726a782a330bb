"""Keep the levels in an SQLite file."""

import sqlite3
from datetime import UTC, datetime, timedelta

SCHEMA_VERSION = 4
BUSY_TIMEOUT_S = 12
BATCH_ROWS = 300

SCHEMA = """
create table if not exists level (
    ident integer not null,
    time integer not null,          -- seconds since 1970, UTC
    level_mm integer not null,
    primary key (ident, time)
) without rowid;
"""


class StoreError(RuntimeError):
    """The file was written by another version."""


class LevelStore:
    def __init__(self, path):
        self.db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
        version = self.db.execute("pragma user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise StoreError(f"schema {version} found, {SCHEMA_VERSION} wanted")
        self.db.executescript(SCHEMA)
        self.db.execute(f"pragma user_version = {SCHEMA_VERSION}")
        self._pending = []

    def add(self, ident, time, level_mm):
        """Queue a level; a full batch is written at once."""
        self._pending.append((ident, int(time.timestamp()), level_mm))
        if len(self._pending) >= BATCH_ROWS:
            self.flush()

    def flush(self):
        with self.db:
            self.db.executemany("insert or replace into level values (?, ?, ?)", self._pending)
        self._pending.clear()

    def between(self, ident, start, end):
        """The (time, level_mm) rows with start <= time < end, oldest first."""
        rows = self.db.execute(
            "select time, level_mm from level where ident = ? and time >= ? and time < ? order by time",
            (ident, int(start.timestamp()), int(end.timestamp())),
        )
        return [(datetime.fromtimestamp(t, UTC), level) for t, level in rows]

    def latest(self, ident):
        """The time of the newest level of a station, or None."""
        row = self.db.execute("select max(time) from level where ident = ?", (ident,)).fetchone()
        return None if row[0] is None else datetime.fromtimestamp(row[0], UTC)

    def prune(self, keep_days, now):
        """Delete levels that are older than keep_days and return how many there were."""
        limit = int((now - timedelta(days=keep_days)).timestamp())
        with self.db:
            return self.db.execute("delete from level where time < ?", (limit,)).rowcount

    def close(self):
        self.flush()
        self.db.close()
