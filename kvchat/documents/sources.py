"""From the paths that were asked for to the files to read."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvchat.documents.characters import safe_name
from kvchat.documents.document import Skipped
from kvchat.documents.folder import list_files
from kvchat.documents.names import unique_names
from kvchat.documents.options import Options
from kvchat.errors import InputError, UsageError


@dataclass(frozen=True)
class Source:
    """Something to read under a display name: a file, or standard input (path is None). `folder`
    is the argument that it was found in, None if it was asked for by name."""

    name: str
    path: Path | None
    folder: Path | None


@dataclass(frozen=True)
class Sources:
    """What to read, keyed so that each file is there once; the keys of what each folder holds,
    wherever they were asked for first; and what is skipped in each folder."""

    to_read: dict[str, Source] = field(default_factory=dict)
    folders: dict[Path, list[str]] = field(default_factory=dict)
    skipped: list[tuple[Path, Skipped]] = field(default_factory=list)


def find_sources(paths: Sequence[str | Path], options: Options) -> Sources:
    """List the files that `paths` ask for, in that order; "-" is standard input.

    Raises InputError for a path that is not there, or is neither a file nor a folder; UsageError for
    an empty one.
    """
    sources = Sources()
    to_name: list[tuple[tuple[str, ...], int]] = []

    def add(key: str, path: Path | None, shown: int = 1, folder: Path | None = None) -> None:
        if key not in sources.to_read:
            sources.to_read[key] = Source("", path, folder)
            to_name.append((Path(os.path.abspath(path)).parts[1:] if path else ("stdin",), shown))
        elif folder is None:
            sources.to_read[key] = replace(sources.to_read[key], folder=None)

    for given in paths:
        if not str(given):
            raise UsageError("a path is empty; name a file or folder")
        path = Path(given) if os.path.lexists(given) else Path(given).expanduser()
        if str(given) == "-":
            add("-", None)
        elif not _is_folder(path):
            add(os.path.realpath(path), path)
        else:
            files, skipped = list_files(path, options)
            sources.folders[path] = [os.path.realpath(path / file) for file in files]
            sources.skipped.extend(
                (path, Skipped(safe_name(name), why))
                for name, why in skipped
                if os.path.realpath(path / name) not in sources.to_read
            )
            for key, file in zip(sources.folders[path], files, strict=True):
                add(key, path / file, file.count("/") + 1, path)

    for key, name in zip(list(sources.to_read), unique_names(to_name), strict=True):
        sources.to_read[key] = replace(sources.to_read[key], name=name)
    return sources


def _is_folder(path: Path) -> bool:
    name = safe_name(str(path))
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "\"'"
        advice = (
            "leave out the quotes" if quoted else "check the spelling, and quote a path that holds spaces"
        )
        raise InputError(f"no such file or folder: {name}; {advice}") from None
    except OSError as error:
        advice = "check its permissions"
        raise InputError(f"{name} cannot be read: {error.strerror}; {advice}") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        advice = "pipe its text in and name it -"
        raise InputError(f"{name} is not a regular file; {advice}")
    return stat.S_ISDIR(mode)
