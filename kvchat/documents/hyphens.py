"""Hyphens at the ends of lines: part of the word, or put there by the typesetter?"""

import re

# Stands before the first character of each page but the first while a text is being edited; no
# text holds it, since controls were replaced before.
PAGE = "\x00"

_SOFT = re.compile(r"\xad(?:[ \t]*\n)?")
_BREAK = re.compile(rf"-[ \t]*({PAGE}*)\n({PAGE}*)")
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
_BEFORE = re.compile(r"[^\W_]+(?:-[^\W_]+)*\Z")
_LONGEST_WORD = 80


def resolve_soft_hyphens(text: str) -> str:
    """Remove soft hyphens, with the line end that follows one, between a letter and a small letter.

    Elsewhere a soft hyphen becomes a hyphen and the line end stays: some PDFs write every hyphen
    as a soft one, and F-13 must not become F13.
    """

    def resolve(match: re.Match[str]) -> str:
        start, end = match.span()
        before, after = text[max(0, start - 1) : start], text[end : end + 1]
        return "" if before.isalpha() and after.islower() else match[0].replace("\xad", "-")

    return _SOFT.sub(resolve, text)


def join_broken_words(text: str) -> str:
    """Join the words that a hyphen breaks at a line end, where the same text shows how.

    `op-` / `posite` becomes `opposite` if that word stands elsewhere in the text, and `state-of-` /
    `the-art` becomes `state-of-the-art` if that one does. With neither or both there is no telling,
    and hyphen and line end stay. No hyphen before or after a digit or a capital is ever removed.
    PAGE marks keep their place among the letters.
    """
    compounds = set(_WORD.findall(text.casefold()))
    words = {word for compound in compounds for word in compound.split("-")}

    def join(match: re.Match[str]) -> str:
        before = _BEFORE.search(text[max(0, match.start() - _LONGEST_WORD) : match.start()])
        after = _WORD.match(text, match.end())
        if not before or not after:
            return match[0]
        left, right = before[0].split("-")[-1], after[0].split("-")[0]
        joined = left.isalpha() and right.isalpha() and right.islower() and (left + right).casefold() in words
        compound = f"{before[0]}-{after[0]}".casefold() in compounds
        if joined == compound:
            return match[0]
        return ("" if joined else "-") + match[1] + match[2]

    return _BREAK.sub(join, text)
