"""Where kvchat keeps its files: platformdirs' folders, or everything below KVCHAT_HOME."""

import os
from pathlib import Path

import platformdirs


def _place(kind: str) -> Path:
    home = os.environ.get("KVCHAT_HOME")
    if home:
        return Path(home).expanduser() / kind
    return Path(getattr(platformdirs, f"user_{kind}_dir")("kvchat", appauthor=False))


def models() -> Path:
    """Converted models. Safe to delete: they are made again from their source."""
    return _place("cache") / "models"


def history_file() -> Path:
    """The questions typed in the REPL."""
    return _place("state") / "history"


def config_file() -> Path:
    return _place("config") / "config.toml"
