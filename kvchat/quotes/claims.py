"""What an answer says that a document can be asked about: its quotes, quoted strings, numbers, identifiers and names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

QUOTE, STRING, NUMBER, IDENTIFIER, NAME = "quote", "string", "number", "identifier", "name"

_MARKER = re.compile(r"^\s*(?:[-*+\u2022]\s+|\d{1,3}[.)]\s+|#+\s+)*")
_STRING = re.compile(
    r"\"([^\"\n]+)\"|\u201c([^\u201d\n]+)\u201d|\xab([^\xbb\n]+)\xbb|\u2018(.+?)\u2019(?!\w)|`+([^`\n]+)`+"
)
_TOKEN = re.compile(
    r"(?<!\w)(?:[-+\u2212](?=\d)|--?(?=[^\W\d]))?\w+(?:[-\u2010\u2011.,:/@'\u2019]\w+)*(?:\(\))?"
)
_SAYS = re.compile(r"[^\W_]")
_SUFFIX = re.compile(r"['\u2019](?:d|ll|m|re|s|ve)?$")
_NUMBER = re.compile(r"[-+\u2212]?\d+(?:[.,:/]\d+)*")
_IDENTIFIER = re.compile(r"-|.*(?:\d|_|\(\)|[^\W\d_]{2}\.[^\W\d_]|[^\W\d_]\.[^\W\d_]{2}|[a-z][A-Z])")
_PAIRS = {'"': '"', "\u201c": "\u201d", "\xab": "\xbb"}
# Capitals that name nothing, wherever they stand.
_PLAIN = frozenset(("I", "Yes", "No", "None", "OK"))


@dataclass(frozen=True)
class Claim:
    """Where the whole is not in the document, `parts` are looked up: the lines of a quote, the names and numbers of a phrase;
    or `later`, where the first word starts a sentence and so has a capital that may mean nothing: the phrase without it."""

    text: str
    kind: str
    parts: tuple["Claim", ...] = ()
    later: "Claim | None" = None


def claims(answer: str) -> list[Claim]:
    """Quotes first, then what the rest of the answer holds, in order."""
    quotes: list[Claim] = []
    rest: list[Claim] = []
    for quoted, group in groupby(answer.split("\n"), key=lambda line: line.lstrip().startswith(">")):
        if quoted:
            quotes += _quote([line.lstrip().lstrip("> \t") for line in group])
        else:
            for line in group:
                rest += _said(_MARKER.sub("", line, 1))
    return [claim for claim in quotes + rest if _SAYS.search(claim.text)]


def _quote(lines: list[str]) -> Iterator[Claim]:
    text = _unwrapped("\n".join(lines).strip())
    whole = [_unwrapped(line.strip()) for line in lines if line.strip()]
    if text:
        yield Claim(text, QUOTE, tuple(Claim(line, QUOTE) for line in whole) if len(whole) > 1 else ())


def _unwrapped(text: str) -> str:
    """A quote without the quotation marks around all of it."""
    closing = _PAIRS.get(text[:1])
    inside = text[1:-1]
    return inside if closing and text.endswith(closing) and closing not in inside and inside else text


def _said(line: str) -> Iterator[Claim]:
    """The claims of a line that is no quote."""
    done = 0
    for match in _STRING.finditer(line):
        yield from _plain(line, done, match.start())
        text = next(group for group in match.groups() if group)
        yield Claim(text.strip().rstrip(",.;") or text, STRING)
        done = match.end()
    yield from _plain(line, done, len(line))


def _plain(line: str, start: int, end: int) -> Iterator[Claim]:
    """Numbers, identifiers and names outside of quotation marks. Neighbours make one claim: 1 April 2025."""
    phrase: list[Claim] = []
    opening, last = False, start
    for match in _TOKEN.finditer(line, start, end):
        token = _SUFFIX.sub("", match[0])
        kind = _kind(token)
        if not kind or line[last : match.start()] != " ":
            yield from _phrase(phrase, opening, line)
            phrase, opening = [], _opens(line[: match.start()])
        if kind:
            phrase.append(Claim(token, kind))
        last = match.start() + len(token)
    yield from _phrase(phrase, opening, line)


def _kind(token: str) -> str:
    if _NUMBER.fullmatch(token):
        return NUMBER
    if _IDENTIFIER.match(token):
        return IDENTIFIER
    return NAME if token[0].isupper() and token not in _PLAIN else ""


def _opens(before: str) -> bool:
    """Whether what follows starts a sentence."""
    return before.rstrip("\"'\u201c\u2018(*_ \t")[-1:] in ("", ".", "!", "?")


def _phrase(tokens: list[Claim], opening: bool, line: str) -> Iterator[Claim]:
    if not tokens:
        return
    opening = opening and tokens[0].kind == NAME
    text = _joined(tokens)
    if opening and len(tokens) == 1 and line.strip(" \t*_.!") != text:
        return  # any word has a capital there, unless the line is this name and nothing else
    runs = [(kind, list(run)) for kind, run in groupby(tokens, key=lambda token: token.kind)]
    kind = runs[0][0] if len(runs) == 1 else NAME
    parts = [part for kind, run in runs for part in ([Claim(_joined(run), NAME)] if kind == NAME else run)]
    later = next(_phrase(tokens[1:], False, line), None) if opening else None
    if later is not None and len(runs[0][1]) == 1:
        parts, later = [later], None  # no name goes on after the capital: In 1871
    yield Claim(text, kind, tuple(parts) if parts[0].text != text else (), later)


def _joined(tokens: list[Claim]) -> str:
    return " ".join(token.text for token in tokens)
