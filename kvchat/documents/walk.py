"""The files of a folder that git does not list."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

Ignores = tuple[tuple[str, "GitIgnoreSpec"], ...]


def walk(
    folder: Path, gitignore: bool, reason: Callable[[str], str | None]
) -> Iterator[tuple[str, str | None]]:
    """Yield (path, why it is skipped or None) for what `folder` holds, in no order.

    Paths are relative, with slashes. A folder is yielded (with a final slash) only if it is skipped
    as a whole: `reason` gives a reason for it, or it cannot be read. .git, and with `gitignore`
    what the .gitignore files ignore, are passed over in silence. Symbolic links are not followed.
    """
    pending: list[tuple[str, Ignores]] = [("", ())]
    while pending:
        prefix, ignores = pending.pop()
        try:
            with os.scandir(folder / prefix) as scan:
                entries = list(scan)
        except OSError as error:
            yield prefix, f"cannot be read: {error.strerror}"
            continue
        if gitignore:
            ignores = (*_load(folder, prefix), *ignores)
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            path = prefix + entry.name + ("/" if is_folder else "")
            if entry.name == ".git" or _ignored(path, ignores):
                continue
            if not is_folder:
                yield path, None
            elif (why := reason(path)) is not None:
                yield path, why
            else:
                pending.append((path, ignores))


def _load(folder: Path, prefix: str) -> Ignores:
    file = folder / prefix / ".gitignore"
    try:
        if not file.is_file():
            return ()
        text = os.fsdecode(file.read_bytes())
    except OSError:
        return ()  # as for git, which only warns
    from pathspec import GitIgnoreSpec

    def is_pattern(line: str) -> bool:
        try:
            return bool(GitIgnoreSpec.from_lines([line]))
        except Exception:
            # As for git: it matches nothing.
            return False

    return ((prefix, GitIgnoreSpec.from_lines(filter(is_pattern, text.split("\n")))),)


def _ignored(path: str, ignores: Ignores) -> bool:
    """The deepest .gitignore that speaks of a path decides."""
    for prefix, spec in ignores:
        include = spec.check_file(path.removeprefix(prefix)).include
        if include is not None:
            return include
    return False
