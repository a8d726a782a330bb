"""Small PDFs, written by hand so that each has just the one thing that a test is about."""

import io
from collections.abc import Mapping, Sequence

IMAGE = None
_DRAW_IMAGE = b"q 100 0 0 100 72 600 cm /Im1 Do Q"


def lines(*texts: bytes) -> bytes:
    """The content of a page with a line for each text, which is already escaped as in `(...)`."""
    return b"BT /F1 12 Tf 14 TL 72 720 Td " + b" T* ".join(b"(%b) Tj" % t for t in texts) + b" ET"


def pdf(
    *contents: bytes | None, unicode: Mapping[int, str] | None = None, labels: bytes | None = None
) -> bytes:
    """A PDF with a page for each content stream, or an image for IMAGE.

    `unicode` makes the ToUnicode map of the font: a code to UTF-16-BE in hexadecimal digits.
    `labels` is the /Nums array of the page labels.
    """
    kids = b" ".join(b"%d 0 R" % (5 + 2 * i) for i in range(len(contents)))
    names = b"/PageLabels << /Nums %b >>" % labels if labels is not None else b""
    to_unicode = b"/ToUnicode %d 0 R" % (5 + 2 * len(contents)) if unicode is not None else b""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R %b >>" % names,
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica %b >>" % to_unicode,
        _stream(
            b"\x00",
            b"/Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8",
        ),
    ]
    for i, content in enumerate(contents):
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> /XObject << /Im1 4 0 R >> >> >>" % (6 + 2 * i),
            _stream(_DRAW_IMAGE if content is None else content),
        ]
    if unicode is not None:
        objects.append(_stream(_cmap(unicode)))
    return assemble(objects)


def assemble(objects: Sequence[bytes]) -> bytes:
    """The file that holds `objects`, numbered from 1; the first one is the catalog."""
    out = bytearray(b"%PDF-1.7\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)


def encrypted(data: bytes, user: str, algorithm: str) -> bytes:
    """`data` encrypted by pypdf: algorithm "RC4-128" or "AES-256"."""
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(PdfReader(io.BytesIO(data)))
    writer.encrypt(user, "owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def _stream(body: bytes, entries: bytes = b"") -> bytes:
    return b"<< %b /Length %d >>\nstream\n%b\nendstream" % (entries, len(body), body)


def _cmap(unicode: Mapping[int, str]) -> bytes:
    pairs = "\n".join(f"<{code:02X}> <{value}>" for code, value in unicode.items())
    return (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap\n"
        "1 begincodespacerange <00> <FF> endcodespacerange\n"
        f"{len(unicode)} beginbfchar\n{pairs}\nendbfchar\nendcmap end end"
    ).encode()
