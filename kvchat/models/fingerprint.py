"""What tells one model from another: checksums of everything that decides what it computes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvchat import places

ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "partial_rotary_factor")


def fingerprint(folder: Path) -> dict[str, str]:
    """Named checksums of a model's folder. Weights are read once: their checksum is kept with the file's size and times."""
    config = json.loads((folder / "config.json").read_bytes())
    rope = {name: config.pop(name, None) for name in ROPE}
    return {
        "RoPE settings": _digest(rope),
        "model configuration": _digest(config),
        "tokenizer": _files(folder, "tokenizer.json"),
        "chat template": _files(folder, "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
        "weights": _digest(_weights(folder)),
        "adapters": _files(folder, "adapter_config.json"),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _files(folder: Path, *names: str) -> str:
    return _digest({n: _sha256(folder / n) for n in names if (folder / n).is_file()})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(folder: Path) -> list[list[Any]]:
    known = _known()
    entries, new = [], {}
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        where = str(path.resolve())
        before = known.get(where)
        same = isinstance(before, list) and len(before) == 2 and before[0] == state
        digest = before[1] if same and isinstance(before, list) else _sha256(path)
        new[where] = [state, digest]
        entries.append([path.name, stat.st_size, digest])
    if any(known.get(where) != entry for where, entry in new.items()):
        _remember({**known, **new})
    return entries


def _known() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(_file().read_text("utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def _remember(known: dict[str, Any]) -> None:
    """Without it the weights are read again next time: slower, never wrong."""
    path = _file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.write_text(json.dumps(known), "utf-8")
        os.replace(draft, path)


def _file() -> Path:
    return places.models() / "checksums.json"
