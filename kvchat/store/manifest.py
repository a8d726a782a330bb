"""`manifest.json`: what a stored cache is and which files hold it. Written last, and nothing counts that it doesn't name."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvchat.store.files import keep_only, sha256, sha256_of, write
from kvchat.store.key import VERSION, Key

NAME = "manifest.json"


class Unusable(Exception):
    """A stored cache, or a part of it, that cannot be used; the message says why."""


@dataclass(frozen=True)
class File:
    """A file of the cache's folder, by size and checksum."""

    name: str
    bytes: int
    sha256: str

    def check(self, folder: Path) -> None:
        """Raises Unusable unless it is there with this size and checksum."""
        path = folder / self.name
        try:
            if path.stat().st_size != self.bytes:
                raise Unusable(f"{self.name} has another size than it was written with")
            if sha256_of(path) != self.sha256:
                raise Unusable(f"{self.name} is damaged")
        except OSError as error:
            raise Unusable(f"{self.name} cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class Segment:
    """Tokens up to `stop`; `chain` is the checksum of the key and of all tokens up to there."""

    stop: int
    chain: str
    file: File


@dataclass(frozen=True)
class Manifest:
    """`tokens` is the whole text's length; `segments` what has been stored of it, in order, without gaps."""

    key: Key
    model: str
    format: str
    documents: tuple[str, ...]
    tokens: int
    created: str
    text: File
    segments: tuple[Segment, ...] = ()

    @property
    def stored_tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def links(self) -> list[tuple[int, str]]:
        """Where each segment ends, and the chain up to there."""
        return [(segment.stop, segment.chain) for segment in self.segments]

    @property
    def whole(self) -> bool:
        return self.stored_tokens == self.tokens

    def with_segments(self, segments: tuple[Segment, ...]) -> Manifest:
        return replace(self, segments=segments)

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        write(folder / NAME, _encode({"version": VERSION, **asdict(self)}))

    def remove_others(self, folder: Path) -> int:
        """Remove what lies in the folder and isn't named here; how many that were. Raises OSError."""
        return keep_only(folder, {NAME, self.text.name, *(segment.file.name for segment in self.segments)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises Unusable for a manifest that isn't there, not whole, changed in any byte, or another version's."""
        try:
            if not (folder / NAME).is_file() and (folder / NAME).exists():
                raise Unusable("its manifest is no file")  # opening a pipe would wait for ever
            data = (folder / NAME).read_bytes()
        except OSError as error:
            raise Unusable(f"its manifest cannot be read ({error.strerror})") from None
        try:
            value = json.loads(data)
            intact = _encode({k: v for k, v in value.items() if k != "checksum"}) == data
        except (ValueError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise Unusable("its manifest is damaged")
        if value.get("version") != VERSION:
            raise Unusable("another version of kvchat wrote it")
        try:
            return cls._from(value)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Unusable("its manifest makes no sense") from None

    @classmethod
    def _from(cls, value: dict[str, Any]) -> Manifest:
        return cls(
            Key({str(part): str(what) for part, what in value["key"]["parts"].items()}),
            str(value["model"]),
            str(value["format"]),
            tuple(map(str, value["documents"])),
            int(value["tokens"]),
            str(value["created"]),
            File(**value["text"]),
            tuple(Segment(int(s["stop"]), str(s["chain"]), File(**s["file"])) for s in value["segments"]),
        )


def _encode(value: dict[str, Any]) -> bytes:
    """One spelling for one value, with a checksum of itself, so that any changed byte shows."""
    body = json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1)
    return json.dumps(
        {**value, "checksum": sha256(body.encode())}, ensure_ascii=False, sort_keys=True, indent=1
    ).encode()
