"""Reads files, folders and standard input into documents whose every character knows its place.

    steps = read(["book.pdf", "src/"], Options(hidden=True))   # yields Step, returns a Reading
    reading = read_now(["book.pdf"])                           # the same without the steps
    reading.documents[0].locate(1234)                          # p. 12 (PDF page 20)

Text that cannot be read raises kvchat.errors.InputError. Importing this package is cheap: pypdf,
pathspec and charset-normalizer are imported when a file first needs them.
"""

from kvchat.documents.document import Document, Place, Reading, Skipped, Span, Step
from kvchat.documents.options import Options
from kvchat.documents.reading import read, read_now

__all__ = [
    "Document",
    "Options",
    "Place",
    "Reading",
    "Skipped",
    "Span",
    "Step",
    "read",
    "read_now",
]
