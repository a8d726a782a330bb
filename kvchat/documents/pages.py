"""Page ranges, as people write and read them: "1-20,25"."""

import re
from collections.abc import Iterable

from kvchat.errors import UsageError

_RANGE = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")


def parse_pages(spec: str) -> list[tuple[int, int]]:
    """The (first, last) of each range in `spec`, both counted from 1 and both included.

    Raises UsageError for anything but numbers and rising ranges between commas.
    """
    ranges = []
    for part in spec.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise UsageError(f"--pages {spec!r} is no list of pages; write it like 1-20,25")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first:
            raise UsageError(f"--pages {spec!r} has a page 0; pages count from 1")
        if last < first:
            raise UsageError(f"--pages {spec!r} falls from {first} to {last}; write it like 1-20,25")
        ranges.append((first, last))
    return ranges


def select_pages(spec: str | None, total: int) -> list[int]:
    """The pages that `spec` names out of `total`, each once, rising; all of them for None.

    Raises UsageError for a page after the last.
    """
    ranges = [(1, total)] if spec is None else parse_pages(spec)
    beyond = max(last for _, last in ranges)
    if beyond > total:
        raise UsageError(f"--pages names page {beyond:,} of a PDF of {total:,} pages; stay within them")
    return sorted({page for first, last in ranges for page in range(first, last + 1)})


def name_pages(pages: Iterable[int]) -> str:
    """`page 4` or `pages 4-5, 9` for rising page numbers."""
    ranges: list[list[int]] = []
    for page in pages:
        if ranges and page == ranges[-1][1] + 1:
            ranges[-1][1] = page
        else:
            ranges.append([page, page])
    one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    listed = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)
    return f"{'page' if one else 'pages'} {listed}"
