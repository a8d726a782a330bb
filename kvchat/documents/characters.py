"""Characters that no tokenizer and no terminal can take."""

import re

REPLACEMENT = "\ufffd"

_C0 = re.compile(r"[\x00-\x08\x0b-\x1f]")
_UNFIT_FOR_NAMES = re.compile(r"[\t\n\x7f-\x9f\u2028\u2029]")


def mend(text: str) -> tuple[str, int]:
    """Return `text` with the halves of surrogate pairs joined, and with each lone surrogate and
    each C0 control but newline and tab as U+FFFD; and how many were replaced.

    Nothing is deleted: a glyph without a Unicode value often is the hyphen of an "F-13".
    """
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    mended = _C0.sub(REPLACEMENT, joined)
    return mended, mended.count(REPLACEMENT) - text.count(REPLACEMENT)


def replaced_note(count: int) -> tuple[str, ...]:
    """The note on `count` replaced characters; none for 0."""
    if not count:
        return ()
    what = "1 character is" if count == 1 else f"{count:,} characters are"
    return (f"{what} shown as U+FFFD (control characters, or without a Unicode value)",)


def safe_name(name: str) -> str:
    """A file's name fit for display: one line, no controls, no lone surrogates."""
    return _UNFIT_FOR_NAMES.sub(REPLACEMENT, mend(name)[0])
