"""What may be asked of a read."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """How to read. Files that are named one by one escape all but the size limit; the rest of the
    file rules is for what a folder holds.

    include, exclude  patterns as in .gitignore, matched against paths within the folder
    hidden            read names that begin with a dot (never .git)
    gitignore         leave out what git ignores
    max_file_size     bytes
    password          opens encrypted PDFs, after the empty password was tried
    pages             of each PDF, counted from 1 whatever their labels say: "1-20,25"
    layout            keep the columns of a PDF page apart with spaces
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hidden: bool = False
    gitignore: bool = True
    max_file_size: int = 50_000_000
    password: str | None = field(default=None, repr=False)
    pages: str | None = None
    layout: bool = False
