"""The last conversation about each set of documents, on disk, for `kvchat chat -c`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvchat import places
from kvchat.documents import Options
from kvchat.errors import KVChatError, UsageError
from kvchat.store import files


@dataclass(frozen=True)
class Said:
    """A turn; `ids` are the answer's tokens, which its text may not give back, and `context` is what the model read before
    the question."""

    question: str
    answer: str
    ids: list[int]
    context: str = ""


@dataclass(frozen=True)
class Conversation:
    """`paths` are absolute; `cache` is the stored cache that the documents are in."""

    paths: tuple[str, ...]
    options: Options  # without a password
    system: str | None
    cache: str | None
    turns: tuple[Said, ...]

    @classmethod
    def about(
        cls,
        paths: Sequence[str],
        options: Options,
        system: str | None,
        cache: str | None,
        turns: Sequence[Said],
    ) -> Conversation:
        return cls(_absolute(paths), replace(options, password=None), system, cache, tuple(turns))

    def options_with(self, given: Options) -> Options:
        """The options that its documents were read with, and the password of `given`. Raises UsageError where `given` asks for
        another one."""
        for option in fields(Options):
            mine, new = getattr(self.options, option.name), getattr(given, option.name)
            if option.name != "password" and new not in (option.default, mine):
                raise UsageError(
                    f"the conversation was about documents read with {option.name.replace('_', '-')} {mine or 'not set'}, "
                    f"and not {new}; leave that out, or leave out -c"
                )
        return replace(self.options, password=given.password)

    def save(self) -> None:
        """Raises KVChatError where it cannot be written."""
        file = _file(self.paths)
        try:
            files.make_private(file.parent)
            files.write(file, json.dumps(asdict(self), ensure_ascii=False).encode())
        except OSError as error:
            raise KVChatError(
                f"the conversation is not kept: {file}: {error.strerror} (--no-history keeps none)"
            ) from None


def last(paths: Sequence[str]) -> Conversation | None:
    """The conversation about these documents; without any, the one that was added to last. Raises KVChatError for a file
    that cannot be read."""
    if paths:
        file = _file(_absolute(paths))
    else:
        kept = [f for f in places.conversations().glob("*.json") if not f.name.startswith(".")]
        if not kept:
            return None
        file = max(kept, key=lambda f: f.stat().st_mtime)
    try:
        value = json.loads(file.read_bytes())
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in value["options"].items()
        }
        turns = tuple(Said(**said) for said in value["turns"])
        texts = [*value["paths"], value["system"] or "", value["cache"] or "", options_text(given)]
        texts += [text for said in turns for text in (said.question, said.answer, said.context)]
        ids = [i for said in turns for i in said.ids]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(i, int) and i >= 0 for i in ids
        ):
            raise ValueError("it makes no sense")
        return Conversation(tuple(value["paths"]), Options(**given), value["system"], value["cache"], turns)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVChatError(f"{file} cannot be read ({error}); remove it and leave out -c") from None


def options_text(given: dict[str, Any]) -> str | None:
    """The pages, which are text or not given; None where an option has another type than it must."""
    types = {name: type(getattr(Options(), name)) for name in given}
    fits = all(name == "pages" or isinstance(value, types[name]) for name, value in given.items())
    return (given.get("pages") or "") if fits else None


def forget(paths: Sequence[str]) -> None:
    _file(_absolute(paths)).unlink(missing_ok=True)


def _absolute(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.abspath(Path(path).expanduser()) for path in paths)


def _file(paths: Sequence[str]) -> Path:
    return places.conversations() / f"{files.sha256(json.dumps(paths).encode())[:16]}.json"
