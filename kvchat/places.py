"""Where kvchat keeps its files: platformdirs' folders, or everything below KVCHAT_HOME."""

import os
from pathlib import Path

import platformdirs

from kvchat.errors import KVChatError


def _place(kind: str) -> Path:
    home = os.environ.get("KVCHAT_HOME")
    if home:
        return Path(home).expanduser() / kind
    return Path(getattr(platformdirs, f"user_{kind}_dir")("kvchat", appauthor=False))


def make(folder: Path) -> Path:
    """The folder, made where it isn't there. Raises KVChatError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise KVChatError(
            f"cannot write to {folder} ({error.strerror}); set KVCHAT_HOME to a folder that can be written"
        ) from None
    return folder


def models() -> Path:
    """Converted models. Safe to delete: they are made again from their source."""
    return _place("cache") / "models"


def caches() -> Path:
    """Prefilled caches. Safe to delete: documents are read again."""
    return _place("cache") / "caches"


def history_file() -> Path:
    """The questions typed in the REPL."""
    return _place("state") / "history"


def conversations() -> Path:
    """The last conversation about each set of documents."""
    return _place("state") / "conversations"


def config_file() -> Path:
    return _place("config") / "config.toml"
