"""The files of a folder."""

import functools
import os
import stat
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from kvchat.documents.git import git_files
from kvchat.documents.options import Options
from kvchat.documents.rules import Rules
from kvchat.documents.walk import walk


def list_files(folder: Path, options: Options) -> tuple[list[str], list[tuple[str, str]]]:
    """The files to read and the (path, reason) of what is skipped, both sorted by path.

    Paths are relative to `folder`, with slashes, raw (os.fsdecode). The order never depends on
    git's history, so that an unchanged folder gives an unchanged prompt. A symbolic link is always
    skipped: what it points to within the folder is read under its own name. What git ignores is
    left out in silence, and a folder that is skipped as a whole is one entry. Nothing is opened.
    """
    reason = functools.cache(Rules(options).reason)
    listed = git_files(folder) if options.gitignore else None
    found: Iterable[tuple[str, str | None]] = (
        walk(folder, options.gitignore, reason) if listed is None else ((p, None) for p in listed)
    )
    files: list[str] = []
    skipped: dict[str, str] = {}
    for path, why in found:
        if why is None:
            # "a/b/c" is asked about as "a/", "a/b/" and "a/b/c".
            for part in accumulate(path.rstrip("/").split("/"), "{}/{}".format):
                asked = part if part == path else part + "/"
                if (why := reason(asked)) is not None:
                    path = asked
                    break
            else:
                why = _not_regular(folder, path)
        if why is None:
            files.append(path)
        elif why:
            skipped[path] = why
    return sorted(files), sorted(skipped.items())


def _not_regular(folder: Path, path: str) -> str | None:
    """Why the thing at `path` is no file to read; "" if it has gone, None if it is one."""
    full = folder / path
    try:
        mode = full.lstat().st_mode
        there = full.exists()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if stat.S_ISREG(mode):
        return None
    if not stat.S_ISLNK(mode):
        return "not a regular file"
    if not there:
        return "broken symlink"
    inside = Path(os.path.realpath(full)).is_relative_to(os.path.realpath(folder))
    return "symlink within the folder" if inside else "symlink that leaves the folder"
