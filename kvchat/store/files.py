"""Files that are private to their owner, whole or not there, and known by their checksum."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    """Checksum of a file's content, read by mmap. Raises OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return sha256(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return hashlib.sha256(content).hexdigest()


def write(path: Path, data: bytes) -> None:
    """Put `data` at `path`, mode 0600, on the disk when this returns: the old file or the new one, never a part.

    Raises OSError and leaves nothing behind.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


TEMPORARY = ".writing-"


def link(source: Path, target: Path) -> None:
    """The same immutable file under a second name; a copy where the file system has no links. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            write(target, source.read_bytes())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system lets one open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(folder: Path) -> None:
    """Take a folder away at once (a rename), then its files; of a link the link alone. Raises OSError."""
    if folder.is_symlink():
        folder.unlink()
        return
    gone = folder.with_name(f"{TEMPORARY}{folder.name}-{os.getpid()}")
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def keep_only(folder: Path, names: Collection[str]) -> int:
    """Remove everything else that lies in a folder; how many that were. Raises OSError."""
    others = [path for path in folder.iterdir() if path.name not in names]
    for path in others:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return len(others)


def make_private(folder: Path) -> None:
    """Make a folder, mode 0700, with its parents; one that others can read is closed to them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
