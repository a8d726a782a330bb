"""`Entry`: the stored cache of one text: restored as far as it can be trusted, appended segment by segment."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from kvchat.documents import Document
from kvchat.memory import human
from kvchat.store import files
from kvchat.store.key import Key, chain
from kvchat.store.manifest import NAME, File, Manifest, Segment, Unusable
from kvchat.store.store import Store, encode_documents, text_file

if TYPE_CHECKING:
    import torch

    from kvchat.kv.cache import KVCache
    from kvchat.kv.format import KVFormat
    from kvchat.kv.shape import CacheShape


class Entry:
    """What is stored of the tokens `ids`, divided at `ends`, and what will be.

    Nothing here stops an answer: what cannot be used or kept is a line in `notes`. Until `close` the entry is this
    process's, and no other one writes or removes it.
    """

    def __init__(
        self,
        store: Store,
        key: Key,
        ids: Sequence[int],
        ends: Sequence[int],
        documents: Sequence[Document],
        model: str,
        format_name: str,
        planned: int,
        refresh: bool = False,
    ):
        """planned: bytes that the whole cache will take. refresh: use nothing of what is there."""
        self.notes: list[str] = []
        self._store, self._ids, self._ends, self._planned = store, ids, ends, planned
        self._chain = chain(key, ids, ends)
        self._text = encode_documents(documents)
        names = tuple(document.name for document in documents)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._manifest = Manifest(key, model, format_name, names, len(ids), now, text_file(self._text))
        self._folder = store.folder / self._chain[-1][:16]
        self._lock = store.lock(self._folder.name)
        self._writing: bool | None = None  # None: not decided yet
        self._damaged = False  # whether its own folder holds what cannot be used
        self._where = self._folder  # of the files that are kept already
        self._kept: tuple[Segment, ...] = ()
        try:
            if not refresh:
                self._find()
        except OSError as error:
            self._cannot_write(error)
        if len(self._kept) < len(ends) and (problem := store.no_room(planned)):
            self._give_up(problem)

    @property
    def id(self) -> str:
        return self._folder.name

    @property
    def whole(self) -> bool:
        """Whether all of the text is stored."""
        return len(self._kept) == len(self._ends)

    def restore(self, cache: KVCache, shape: CacheShape, fmt: KVFormat, dtype: torch.dtype) -> int:
        """Bring what is stored into an empty cache; returns its number of tokens.

        Everything is verified (checksums, token ids, names, shapes, types) before the cache is touched.
        """
        from kvchat.kv.cache import layout
        from kvchat.store.segments import read

        parts, start = [], 0
        for segment, end in zip(self._kept, self._ends, strict=False):
            try:
                expected = layout(shape, fmt, dtype, start, end, closed=end != self._ends[-1])
                parts.append(read(self._where, segment.file, expected, self._ids[start:end]))
            except Unusable as reason:
                self.notes.append(f"the stored cache cannot be used from token {start:,} on: {reason}")
                self._damaged = self._where == self._folder
                break
            start = end
        self._kept = self._kept[: len(parts)]
        for part in parts:
            cache.adopt(part)
        if parts:
            self._use()
            self._mend_text()
        return start

    def append(self, cache: KVCache, start: int, stop: int) -> None:
        """Store what the cache holds from `start` to `stop`, two ends that follow each other."""
        if not self._may_write():
            return
        from kvchat.store.segments import encode

        try:
            data = encode(cache.part(start), self._ids[start:stop])
            digest = files.sha256(data)
            file = File(f"{len(self._kept):05}-{digest[:12]}.safetensors", len(data), digest)
            files.write(self._folder / file.name, data)
            self._kept += (Segment(stop, self._chain[self._ends.index(stop)], file),)
            self._write_manifest()
        except OSError as error:
            self._cannot_write(error)

    def close(self) -> None:
        """Let other processes have it."""
        self._lock.release(force=True)

    def _find(self) -> None:
        """Choose the stored cache that shares most segments with this text; say what keeps others from being used."""
        stored = self._store.shelf()[::-1]
        for candidate in stored:
            if candidate.manifest is None:
                if candidate.folder == self._folder and candidate.begun:
                    self.notes.append(f"the stored cache cannot be used: {candidate.problem}")
                    self._damaged = True
                continue
            segments, links = candidate.manifest.segments, candidate.manifest.links
            shared = os.path.commonprefix([links, self._links])
            if candidate.folder == self._folder and len(shared) < len(links):
                self.notes.append("the stored cache cannot be used: its manifest is another cache's")
                self._damaged = True
            if len(shared) > len(self._kept):
                self._where, self._kept = candidate.folder, segments[: len(shared)]
        names = self._manifest.documents
        same = [c.manifest for c in stored if c.manifest and c.manifest.documents == names]
        if not self._kept and same and not self.notes:
            self.notes.append(self._difference(same))
        elif self._where != self._folder and not self.whole:
            self.notes.append(
                f"the text differs from the stored one after token {self._kept[-1].stop:,}; it is read from there"
            )

    @property
    def _links(self) -> list[tuple[int, str]]:
        return list(zip(self._ends, self._chain, strict=True))

    def _difference(self, others: Sequence[Manifest]) -> str:
        """What the nearest of other caches of documents with these names was made with."""
        key = self._manifest.key
        other = min(others, key=lambda manifest: len(key.differences(manifest.key)))
        differ = key.differences(other.key)
        if "KV format" in differ:
            differ = [part for part in differ if part != "calibration"]  # which the format decides about
        parts = [f"{'other' if part.endswith('s') else 'another'} {part}" for part in differ]
        if not parts:
            same_text = other.text.name == self._manifest.text.name
            parts = [
                "another instruction" if same_text else f"another text in its first {self._ends[0]:,} tokens"
            ]
        what = " and ".join(parts).replace("another KV format", f"another KV format ({other.format})")
        return f"what is stored of these documents has {what}; they are read anew"

    def _mend_text(self) -> None:
        """Write the documents' text again where it was damaged: citations and `chat -c` need it."""
        if self._where != self._folder:
            return
        try:
            Manifest.read(self._folder).text.check(self._folder)
        except Unusable as reason:
            self.notes.append(f"of the stored cache, {reason}; it is written again")
            self._damaged = True
            if self._may_write():
                try:
                    self._write_manifest()
                except OSError as error:
                    self._cannot_write(error)

    def _use(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._where / NAME)  # used just now
            self._make_room(keep=(self._where,))
            if self._store.bytes > self._store.max_bytes:
                self.notes.append(
                    f"the stored caches take {human(self._store.bytes)} and --max-size is {human(self._store.max_bytes)}; "
                    "one that is in use stays, kvchat cache prune removes it"
                )
        if self._where == self._folder:
            with contextlib.suppress(Timeout, OSError):
                self._lock.acquire()

    def _make_room(self, needed: int = 0, keep: Collection[Path] = ()) -> None:
        """Raises OSError."""
        if gone := self._store.make_room(needed, keep):
            self.notes.append(
                f"the {len(gone)} least recently used of the stored caches went, to stay within --max-size "
                f"({human(self._store.max_bytes)})"
            )

    def _may_write(self) -> bool:
        if self._writing is None:
            try:
                self._writing = self._begin()
            except OSError as error:
                self._cannot_write(error)
        return bool(self._writing)

    def _begin(self) -> bool:
        """Take the folder and put into it what is kept already. Raises OSError."""
        files.make_private(self._store.folder)
        try:
            self._lock.acquire()
        except Timeout:
            return self._give_up("another kvchat has it open")
        if os.path.lexists(self._folder) and not self._folder.is_dir():
            self._folder.unlink()
        self._make_room(self._planned, keep=(self._folder, self._where))
        files.make_private(self._folder)
        if self._damaged:
            files.keep_only(self._folder, {segment.file.name for segment in self._kept})
        try:
            older = Manifest.read(self._folder)
            self._older = older.stored_tokens if older.links == self._links[: len(older.links)] else 0
        except Unusable:
            self._older = 0
        files.write(self._folder / self._manifest.text.name, self._text)
        if self._where != self._folder:
            for segment in self._kept:
                files.link(self._where / segment.file.name, self._folder / segment.file.name)
            self._where = self._folder
        return True

    def _write_manifest(self) -> None:
        manifest = self._manifest.with_segments(self._kept)
        if manifest.stored_tokens < self._older:
            return  # until there is as much of the new cache, the old one stays
        manifest.write(self._folder)
        if manifest.whole:
            manifest.remove_others(self._folder)

    def _cannot_write(self, error: OSError) -> None:
        where = error.filename2 or error.filename or self._store.folder
        self._give_up(f"{where}: {error.strerror}")

    def _give_up(self, reason: str) -> bool:
        """The answer does not depend on it. What was begun goes: it holds the documents' text."""
        if self._lock.is_locked and not (self._folder / NAME).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._writing = False
        self.notes.append(f"this cache is not kept on disk: {reason} (--no-cache keeps none)")
        return False
