"""Tables on wide and on narrow terminals."""

import io

from rich.console import Console

from kvchat.ui.tables import table

ROWS = [["kivi4", "691 MiB", "a note of several words"], ["kivi2", "417 MiB", ""]]


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(["format", "100,000 tokens", "note"], ROWS, "a title"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_wide_terminal_shows_a_table() -> None:
    lines = shown(60).splitlines()
    assert any("kivi4" in line and "691 MiB" in line and "several" in line for line in lines)


def test_a_narrow_one_shows_a_list_in_which_no_number_is_broken() -> None:
    lines = [line.rstrip() for line in shown(26).splitlines()]
    assert "kivi4" in lines and "kivi2" in lines
    assert "  100,000 tokens: 691 MiB" in lines
    assert sum("note:" in line for line in lines) == 1  # and none where there is no note
