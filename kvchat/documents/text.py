"""The reader of text files."""

import codecs

from kvchat.documents.characters import REPLACEMENT, mend, replaced_note
from kvchat.documents.document import Document, Span
from kvchat.documents.unreadable import Unreadable

# UTF-32-LE's mark begins with UTF-16-LE's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_PROBE = 8192
_ENOUGH_TO_GUESS = 1024
# fmt: off
_BINARY = (
    ".7z", ".bin", ".bz2", ".dll", ".docx", ".epub", ".exe", ".gif", ".gz", ".ico", ".jar", ".jpeg",
    ".jpg", ".mp3", ".mp4", ".odt", ".png", ".pptx", ".pyc", ".safetensors", ".so", ".ttf", ".webp",
    ".woff", ".woff2", ".xlsx", ".xz", ".zip",
)
# fmt: on


def read_text(name: str, data: bytes) -> Document:
    """The document in the bytes of a text file, one span that starts at line 1.

    Line ends become newlines; a form feed or vertical tab becomes a space, which keeps both offsets
    and line numbers; other controls become U+FFFD. Raises Unreadable if there is nothing to read.
    """
    text, notes = decode(data)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", " ").replace("\v", " ")
    text, replaced = mend(text)
    if not text.strip():
        raise Unreadable("empty", "give a file that holds text")
    return Document(name, text, (Span(0, len(text), line=1),), notes + replaced_note(replaced))


def decode(data: bytes) -> tuple[str, tuple[str, ...]]:
    """The text of `data` and a note if its encoding had to be guessed. Raises Unreadable when it
    is binary: a NUL in the first 8 KB and no byte order mark."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decode_marked(data[len(mark) :], encoding)
    if b"\0" in data[:_PROBE]:
        raise binary()
    try:
        return data.decode(), ()
    except UnicodeDecodeError:
        return _guess(data)


def has_binary_name(name: str) -> bool:
    """Whether a file's name tells that it is binary, so that it needs not be opened."""
    return name.lower().endswith(_BINARY)


def binary() -> Unreadable:
    return Unreadable("binary", "give a text file or a PDF, or convert it first")


def _decode_marked(data: bytes, encoding: str) -> tuple[str, tuple[str, ...]]:
    try:
        # Lone surrogates are mended, and counted, with the other characters.
        return data.decode(encoding, "strict" if encoding == "utf-8" else "surrogatepass"), ()
    except UnicodeDecodeError:
        return data.decode(encoding, "replace"), (f"decoded as damaged {encoding}",)


def _guess(data: bytes) -> tuple[str, tuple[str, ...]]:
    # A book with a damaged byte is still UTF-8; another encoding would garble all its letters.
    text = data.decode("utf-8", "replace")
    damaged = text.count(REPLACEMENT)
    intact = len(text) - len(text.encode("ascii", "ignore")) - damaged
    if intact >= 10 * damaged:
        return text, ("decoded as damaged utf-8",)
    encoding = "cp1252"
    # Shorter texts are mistaken for Arabic, Cyrillic or Chinese.
    if len(data) >= _ENOUGH_TO_GUESS:
        from charset_normalizer import from_bytes

        best = from_bytes(data).best()
        encoding = best.encoding if best else encoding
    return data.decode(encoding, "replace"), (f"decoded as {encoding}",)
