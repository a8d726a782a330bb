"""Does the text of a page run across two columns?"""

import re
from collections import Counter

_GAP = re.compile(r"\S( {3,})(?=\S*[^\W\d_]{2})")
_FEWEST_LINES = 6


def runs_across_columns(plain: str, layout: str) -> bool:
    """Whether `plain`, the text of a page in the order of its lines, mixes two columns.

    `layout` is the same page with spaces for its white space. It has two columns where at least
    half of the lines have a gap that ends at the same place, and words after it (a column of page
    numbers is a table of contents); the text is mixed where a plain line holds both sides of the gap.
    """
    lines = [line for line in layout.split("\n") if line.strip()]
    mixed = {" ".join(line.split()) for line in plain.split("\n")}
    ends = Counter(
        match.end(1) for line in lines if " ".join(line.split()) in mixed for match in _GAP.finditer(line)
    )
    return max(ends.values(), default=0) >= max(_FEWEST_LINES, len(lines) / 2)
