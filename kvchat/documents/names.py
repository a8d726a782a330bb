"""Short names for files, each its own."""

from collections import Counter
from collections.abc import Sequence

from kvchat.documents.characters import safe_name


def unique_names(files: Sequence[tuple[tuple[str, ...], int]]) -> list[str]:
    """A name for each file, given as the parts of its path and how many of the last ones to show.

    Names that are equal grow to the left until they differ. Those that differ only by characters
    that cannot be shown are numbered.
    """
    shown = [count for _, count in files]
    while True:
        raw = ["/".join(parts[-count:]) for (parts, _), count in zip(files, shown, strict=True)]
        times = Counter(raw)
        short = [i for i, name in enumerate(raw) if times[name] > 1 and shown[i] < len(files[i][0])]
        if not short:
            break
        for i in short:
            shown[i] += 1
    names: dict[str, None] = {}
    for name in map(safe_name, raw):
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name} ({number})"
        names[unique] = None
    return list(names)
