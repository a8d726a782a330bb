"""From paths to documents."""

from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

from kvchat.documents.characters import safe_name
from kvchat.documents.document import Document, Reading, Skipped, Step
from kvchat.documents.options import Options
from kvchat.documents.pages import parse_pages
from kvchat.documents.pdf import is_pdf, read_pdf
from kvchat.documents.sources import Source, find_sources
from kvchat.documents.text import binary, has_binary_name, read_text
from kvchat.documents.unreadable import Unreadable
from kvchat.errors import InputError, UsageError

_DEFAULT = Options()


def read(
    paths: Sequence[str | Path], options: Options = _DEFAULT, stdin: bytes | None = None
) -> Generator[Step, None, Reading]:
    """Read files, folders, and `stdin` where a path is "-"; yield Steps and return the Reading.

    Arguments are read in the order given, the files of a folder sorted by path, no file twice.
    What fails within a folder is skipped with its reason. Raises InputError for a file that was
    named and cannot be read and for a folder that gives nothing, UsageError for options that
    cannot be met.
    """
    if options.pages is not None:
        parse_pages(options.pages)
    if stdin is None and "-" in map(str, paths):
        raise UsageError("'-' stands for standard input, and there is none; pipe text in")
    sources = find_sources(paths, options)
    skipped = list(sources.skipped)
    documents: dict[str, Document] = {}
    for done, (key, source) in enumerate(sources.to_read.items(), 1):
        try:
            documents[key] = yield from _read_one(source, options, stdin or b"")
        except Unreadable as error:
            if source.folder is None:
                raise InputError(error.message(source.name)) from error
            skipped.append((source.folder, Skipped(source.name, error.reason)))
        yield Step(source.name, done, len(sources.to_read), "files")
    for folder, keys in sources.folders.items():
        if documents.keys().isdisjoint(keys):
            raise InputError(_nothing_in(folder, [why for place, why in skipped if place == folder]))
    return Reading(tuple(documents.values()), tuple(why for _, why in skipped))


def read_now(paths: Sequence[str | Path], options: Options = _DEFAULT, stdin: bytes | None = None) -> Reading:
    """What `read` returns, without its steps."""
    steps = read(paths, options, stdin)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            reading: Reading = end.value
            return reading


def _read_one(source: Source, options: Options, stdin: bytes) -> Generator[Step, None, Document]:
    data = stdin if source.path is None else _load(source.path, options.max_file_size)
    if is_pdf(source.path.name if source.path else "", data):
        return (yield from read_pdf(source.name, data, options))
    return read_text(source.name, data)


def _load(path: Path, most: int) -> bytes:
    if has_binary_name(path.name):
        raise binary()
    try:
        size = path.stat().st_size
        if size > most:
            raise Unreadable(f"too large ({_size(size)})", "see --max-file-size")
        return path.read_bytes()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise Unreadable(reason, "check its permissions", verb="") from error


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 10**6 else f"{size:,} bytes"


def _nothing_in(folder: Path, skipped: list[Skipped]) -> str:
    reasons = Counter(why.reason for why in skipped).most_common()
    causes = ", ".join(f"{count} {reason}" for reason, count in reasons[:5])
    why = causes or "it is empty, or git ignores what it holds"
    advice = "name a file, or see --include, --exclude, --hidden and --no-gitignore"
    return f"nothing readable in {safe_name(str(folder))} ({why}); {advice}"
