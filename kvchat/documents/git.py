"""What git says about a folder. Only git knows all of its own rules."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

# A hook exports these, and they would point git at another work tree than the folder's.
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


def git_files(folder: Path) -> list[str] | None:
    """Paths under `folder`, relative to it and with slashes, of what git tracks or would track,
    with those of repositories inside it. Files may have gone from the disk.

    None without git, outside of a work tree, and for a folder that is itself ignored: whoever
    names such a folder wants what is in it.
    """
    if _git(folder, "rev-parse", "--is-inside-work-tree") != b"true\n":
        return None
    if _git(folder, "check-ignore", "-q", ".") is not None:
        return None
    listed = _git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    return None if listed is None else list(_expand(folder, listed))


def _expand(folder: Path, listed: bytes) -> Iterator[str]:
    for entry in sorted({os.fsdecode(path) for path in listed.split(b"\0") if path}):
        path = entry.rstrip("/")
        inner = folder / path
        if (inner / ".git").exists() and not inner.is_symlink():
            yield from (f"{path}/{name}" for name in git_files(inner) or ())
        elif inner.is_symlink() or not inner.is_dir():
            yield path


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints, None if it fails. fsmonitor is a program that a repository can name, and a
    folder that is only read must not run any."""
    environment = {key: value for key, value in os.environ.items() if key not in _MISLEADING}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
