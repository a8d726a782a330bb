"""`Store`: the folder of all stored caches: what is there, what goes when room is needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvchat.documents import Document, Span
from kvchat.memory import human
from kvchat.store import files
from kvchat.store.manifest import NAME, File, Manifest, Unusable


@dataclass(frozen=True)
class Stored:
    """A cache's folder as it lies there: its manifest, or the problem with it. `used` in seconds since the epoch."""

    folder: Path
    manifest: Manifest | None
    problem: str
    bytes: int
    used: float

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def begun(self) -> bool:
        """Whether anything of it counts: a folder without a manifest is what a killed process left."""
        return os.path.lexists(self.folder / NAME)

    def documents(self) -> tuple[Document, ...]:
        """The texts that were read, with their spans: citations need no source file. Raises Unusable."""
        if self.manifest is None:
            raise Unusable(self.problem)
        self.manifest.text.check(self.folder)
        return decode_documents((self.folder / self.manifest.text.name).read_bytes())

    def check(self) -> None:
        """Read every byte of it. Raises Unusable."""
        if self.manifest is None:
            raise Unusable(self.problem)
        for file in (self.manifest.text, *(segment.file for segment in self.manifest.segments)):
            file.check(self.folder)


ID = re.compile("[0-9a-f]{16}")
"""Names of the caches' folders."""


class Store:
    """All stored caches in `folder`, at most `max_bytes` of them together."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes

    def shelf(self) -> list[Stored]:
        """Every cache, the least recently used first."""
        return sorted(self._all(), key=lambda stored: stored.used)

    def get(self, name: str) -> Stored | None:
        """The cache of this id, if it can be used."""
        return next((s for s in self._all() if s.id == name and s.manifest is not None), None)

    def _all(self) -> Iterator[Stored]:
        for folder in self._folders():
            with contextlib.suppress(OSError):  # it went while we looked
                manifest, problem = None, ""
                try:
                    manifest = Manifest.read(folder)
                except Unusable as reason:
                    problem = str(reason)
                path = folder / NAME
                used = (path if path.exists() else folder).stat().st_mtime
                yield Stored(folder, manifest, problem, sum(_sizes([folder]).values()), used)

    def _folders(self) -> list[Path]:
        """Raises OSError where one cannot look."""
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in paths if path.is_dir() and ID.fullmatch(path.name)]

    @property
    def bytes(self) -> int:
        """What all of it takes on the disk; a file that several caches share counts once."""
        return sum(_sizes(self._folders()).values())

    def lock(self, name: str) -> FileLock:
        """The lock that whoever writes, uses or removes a cache holds."""
        return FileLock(self.folder / f".{name}.lock", mode=0o600, timeout=0)

    def remove(self, stored: Stored) -> bool:
        """Whether it is gone; it stays where another process uses it. Raises OSError."""
        lock = self.lock(stored.id)
        try:
            with lock:
                files.remove(stored.folder)
                Path(lock.lock_file).unlink(missing_ok=True)
        except Timeout:
            return False
        return True

    def make_room(self, needed: int = 0, keep: Collection[Path] = ()) -> list[Stored]:
        """Remove the least recently used caches until `needed` more bytes stay within `max_bytes`; returns those.

        Those to keep stay, and where they alone are too many bytes, all others do too.
        """
        gone: list[Stored] = []
        if sum(_sizes(folder for folder in keep if folder.is_dir()).values()) + needed > self.max_bytes:
            return gone
        for stored in self.shelf():
            if self.bytes + needed <= self.max_bytes:
                break
            if stored.folder not in keep and self.remove(stored):
                gone.append(stored)
        return gone

    def sweep(self) -> int:
        """Remove what killed processes left (files that were being written, folders that were being removed), what has a
        cache's name and is none, and what lies in a cache and doesn't belong there; how many that were. What has other names is
        not the store's. Raises OSError."""
        folders, count = self._folders(), 0
        for path in self.folder.iterdir() if folders or self.folder.exists() else ():
            if path.name.startswith(files.TEMPORARY) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
                count += 1
            elif path.name.startswith(files.TEMPORARY) or (ID.fullmatch(path.name) and path not in folders):
                path.unlink(missing_ok=True)
                count += 1
        for stored in self.shelf():
            if not stored.begun:
                count += self.remove(stored)
            elif stored.manifest is not None:
                with contextlib.suppress(Timeout), self.lock(stored.id):
                    count += stored.manifest.remove_others(stored.folder)
        return count

    def no_room(self, needed: int) -> str | None:
        """Why a cache of `needed` bytes cannot be kept, if it cannot."""
        if needed > self.max_bytes:
            return f"it would take {human(needed)} and --max-size is {human(self.max_bytes)}"
        existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            return f"it would take {human(needed)} and {human(free)} are free in {existing}"
        return None


def encode_documents(documents: Sequence[Document]) -> bytes:
    return json.dumps([asdict(document) for document in documents], ensure_ascii=False).encode()


def decode_documents(data: bytes) -> tuple[Document, ...]:
    return tuple(
        Document(d["name"], d["text"], tuple(Span(**span) for span in d["spans"]), tuple(d["notes"]))
        for d in json.loads(data)
    )


def text_file(data: bytes) -> File:
    """The file that holds `encode_documents`."""
    digest = files.sha256(data)
    return File(f"documents-{digest[:12]}.json", len(data), digest)


def _sizes(folders: Iterable[Path]) -> dict[tuple[int, int], int]:
    """Bytes of every file below, by device and inode."""
    sizes = {}
    for folder in folders:
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                stat = file.stat()
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sizes
