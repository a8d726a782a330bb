"""The reader of PDF files."""

import io
import logging
import re
from collections.abc import Generator
from itertools import accumulate
from typing import TYPE_CHECKING

from kvchat.documents.characters import mend, replaced_note
from kvchat.documents.columns import runs_across_columns
from kvchat.documents.document import Document, Span, Step
from kvchat.documents.hyphens import PAGE, join_broken_words, resolve_soft_hyphens
from kvchat.documents.options import Options
from kvchat.documents.pages import name_pages, select_pages
from kvchat.documents.unreadable import Unreadable

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

_MAGIC = re.compile(rb"^%PDF-", re.MULTILINE)
_LIGATURES = str.maketrans(
    {
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)
_SAVE_AGAIN = "open it in a viewer and save it again"


def is_pdf(name: str, data: bytes) -> bool:
    """Whether a file is a PDF, by its name or by a line that starts with %PDF- in its first KB."""
    return name.lower().endswith(".pdf") or bool(_MAGIC.search(data[:1024].replace(b"\r", b"\n")))


def read_pdf(name: str, data: bytes, options: Options) -> Generator[Step, None, Document]:
    """Read the pages that options.pages asks for, a Step for each, and return the document.

    Pages are joined by one newline. Ligatures are spelled out, line-end hyphens resolved (but not
    with options.layout), controls and lone surrogates become U+FFFD; nothing else is changed. A
    page that fails, or has no text, is a note. Raises Unreadable if no page gives text, and
    UsageError for a page that is not there.
    """
    reader = _open(data, options.password)
    numbers = select_pages(options.pages, _count(reader))
    labels = _labels(reader)
    failed: dict[int, str] = {}
    texts: list[str] = []
    replaced = 0
    for done, number in enumerate(numbers, 1):
        try:
            raw = _extract(reader.pages[number - 1], options.layout)
        except Exception as error:
            raw, failed[number] = "", type(error).__name__
        text, count = mend(raw)
        replaced += count
        texts.append(_tidy(text))
        yield Step(name, done, len(numbers), "pages")

    empty = [number for number, text in zip(numbers, texts, strict=True) if not text]
    if len(failed) == len(numbers):
        causes = ", ".join(sorted(set(failed.values())))
        raise Unreadable(f"no readable page ({_many(len(numbers))}: {causes})", _SAVE_AGAIN, "has")
    if len(empty) == len(numbers):
        reason = f"no text layer ({_many(len(numbers))})"
        raise Unreadable(reason, "run ocrmypdf on it first", "has")

    text, starts, ends = _join(texts, options.layout)
    spans = tuple(
        Span(start, end, page=number, label=labels.get(number))
        for start, end, number in zip(starts, ends, numbers, strict=True)
    )
    notes = _page_notes([n for n in empty if n not in failed], failed) + replaced_note(replaced)
    if not options.layout and _mixes_columns(reader, [n for n in numbers if n not in empty]):
        notes += ("looks like two columns; try --layout",)
    return Document(name, text, spans, notes)


def _open(data: bytes, password: str | None) -> "PdfReader":
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    # It reports each flaw that it works around, through handlers that end on stderr.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    if not data.strip():
        raise Unreadable("empty", "give a file that holds text")
    try:
        reader = PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and not reader.decrypt("")
    except DependencyError:
        raise Unreadable("encrypted with AES", "pip install 'pypdf[crypto]'") from None
    except Exception as error:
        raise _damaged(error) from error
    if locked and password is None:
        raise Unreadable("encrypted", "pass --password or set KVCHAT_PDF_PASSWORD")
    if locked and not _unlocks(reader, password or ""):
        advice = "pass the right one by --password or KVCHAT_PDF_PASSWORD"
        raise Unreadable("encrypted with another password", advice)
    return reader


def _unlocks(reader: "PdfReader", password: str) -> bool:
    try:
        return bool(reader.decrypt(password))
    except Exception:
        # Not chained: the message of an encoding error shows part of the password.
        return False


def _count(reader: "PdfReader") -> int:
    try:
        count = len(reader.pages)
    except Exception as error:
        raise _damaged(error) from error
    if not count:
        raise Unreadable("no pages", _SAVE_AGAIN, "has")
    return count


def _damaged(error: Exception) -> Unreadable:
    return Unreadable(f"a damaged PDF ({type(error).__name__}: {error})", _SAVE_AGAIN)


def _labels(reader: "PdfReader") -> dict[int, str]:
    try:
        labels = [" ".join(mend(label)[0].split()) for label in reader.page_labels]
    except Exception:
        return {}
    return {number: label for number, label in enumerate(labels, 1) if label}


def _extract(page: "PageObject", layout: bool) -> str:
    return page.extract_text(extraction_mode="layout") if layout else page.extract_text()


def _tidy(text: str) -> str:
    text = resolve_soft_hyphens(text.translate(_LIGATURES))
    return text.rstrip().lstrip("\n")


def _join(texts: list[str], layout: bool) -> tuple[str, list[int], list[int]]:
    """The whole text, and where each page starts and ends in it."""
    first = next(index for index, text in enumerate(texts) if text)
    parts = [("\n" if text and index > first else "") + PAGE + text for index, text in enumerate(texts)]
    marked = "".join(parts).removeprefix(PAGE)
    pieces = (marked if layout else join_broken_words(marked)).split(PAGE)
    starts = list(accumulate(map(len, pieces), initial=0))
    ends = [start + len(piece.rstrip("\n")) for start, piece in zip(starts, pieces, strict=False)]
    return "".join(pieces), starts[:-1], ends


def _page_notes(empty: list[int], failed: dict[int, str]) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if empty:
        verb, what = ("has", "image?") if len(empty) == 1 else ("have", "images?")
        notes += (f"{name_pages(empty)} {verb} no text ({what})",)
    if failed:
        causes = ", ".join(sorted(set(failed.values())))
        notes += (f"{name_pages(failed)} could not be read ({causes})",)
    return notes


def _mixes_columns(reader: "PdfReader", numbers: list[int]) -> bool:
    # Three pages tell enough: layout takes as long as the plain text.
    for number in sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]}):
        page = reader.pages[number - 1]
        try:
            if runs_across_columns(_extract(page, False), _extract(page, True)):
                return True
        except Exception:
            continue
    return False


def _many(pages: int) -> str:
    return "1 page" if pages == 1 else f"{pages} pages"
