"""What a cache depends on: everything that could change a bit of it, part by part, so that a difference can be named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvchat.kv.format import KVFormat
from kvchat.store.files import sha256

VERSION = 2
"""Of the layout on disk and of everything that decides what a cache holds: packing, chunking, closing."""


@dataclass(frozen=True)
class Key:
    """Named parts, each a value or the checksum of one. The token ids are chained on top: `chain`."""

    parts: Mapping[str, str]

    @classmethod
    def of(
        cls, fingerprint: Mapping[str, str], fmt: KVFormat, precision: str, chunk: int, segment: int
    ) -> Key:
        """fingerprint: `models.fingerprint`; precision: the model's dtype; chunk and segment in tokens."""
        settings = asdict(fmt)
        del settings["name"]  # kivi2:v=2 is kivi2
        return cls(
            {
                "storage version": str(VERSION),
                **fingerprint,
                "KV format": json.dumps(settings, sort_keys=True),
                "precision": precision,
                "chunk size": f"{chunk} of {segment}",
            }
        )

    @property
    def digest(self) -> str:
        return sha256(json.dumps(dict(self.parts), sort_keys=True).encode())

    def differences(self, other: Key) -> list[str]:
        """The names of the parts that aren't the same."""
        names = [*self.parts, *(name for name in other.parts if name not in self.parts)]
        return [name for name in names if self.parts.get(name) != other.parts.get(name)]


def chain(key: Key, ids: Sequence[int], ends: Sequence[int]) -> list[str]:
    """A checksum for the state at each end: of the key, of every token before it, and of how it ends there.

    The last end is sealed (it has a window), those before it are closed (they have none).
    """
    links, previous, start = [], key.digest, 0
    for end in ends:
        state = "sealed" if end == ends[-1] else "closed"
        previous = sha256(f"{previous} {state} {','.join(map(str, ids[start:end]))}".encode())
        links.append(previous)
        start = end
    return links
