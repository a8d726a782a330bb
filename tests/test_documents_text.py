"""Text files: encodings, characters, lines, places and names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.documents import Document, Options, Place, Reading, Span, Step, read, read_now
from kvchat.errors import InputError, UsageError

FRENCH = "Il a été déçu par la forêt, où les chênes étaient déjà dépouillés. " * 40


def text_of(data: bytes) -> Document:
    (document,) = read_now(["-"], stdin=data).documents
    return document


def test_a_text_file_is_one_span_with_lines(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_bytes(b"one\ntwo\nthree")
    reading = read_now([tmp_path / "poem.txt"])
    (document,) = reading.documents
    assert document == Document("poem.txt", "one\ntwo\nthree", (Span(0, 13, line=1),), ())
    assert reading.skipped == ()
    assert str(document.locate(document.text.index("three"))) == "poem.txt:3"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        (Place("a.py", 12, None, None), "a.py:12"),
        (Place("a.pdf", None, 20, "12"), "p. 12 (PDF page 20)"),
        (Place("a.pdf", None, 12, "12"), "p. 12"),
        (Place("a.pdf", None, 20, ""), "PDF page 20"),
        (Place("a.pdf", None, 20, None), "PDF page 20"),
    ],
)
def test_places_read_as_people_write_them(place: Place, shown: str) -> None:
    assert str(place) == shown


@settings(deadline=None)
@given(st.text(alphabet="ab\n\r\f\u2028\x85", min_size=1).filter(str.strip), st.data())
def test_locate_agrees_with_counting(text: str, data: st.DataObject) -> None:
    document = text_of(text.encode())
    offset = data.draw(st.integers(0, len(document.text)))
    line = 1
    for character in document.text[:offset]:
        line += character == "\n"
    assert document.locate(offset) == Place("stdin", line, None, None)


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab\n", max_size=4), min_size=1), st.data())
def test_locate_agrees_with_a_naive_search_of_pages(pages: list[str], data: st.DataObject) -> None:
    text = ""
    spans: list[Span] = []
    owner: list[int] = []
    for number, page in enumerate(pages, 1):
        if page and text:
            text += "\n"
            owner.append(owner[-1])
        spans.append(Span(len(text), len(text) + len(page), page=number, label=str(number)))
        text += page
        owner += [number] * len(page)
    offset = data.draw(st.integers(0, max(len(text) - 1, 0)))
    place = Document("x", text, tuple(spans)).locate(offset)
    assert place.page == (owner[offset] if owner else 1)


@pytest.mark.parametrize("offset", [-1, 4])
def test_locate_refuses_what_is_outside(offset: int) -> None:
    with pytest.raises(IndexError):
        text_of(b"abc").locate(offset)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be-bom", "utf-32", "utf-32-be-bom"]
)
def test_unicode_is_read_without_a_note(encoding: str) -> None:
    text = "déçu 😀 ①\n"
    if encoding.endswith("-bom"):
        data = ("\ufeff" + text).encode(encoding.removesuffix("-bom"))
    else:
        data = text.encode(encoding)
    assert (text_of(data).text, text_of(data).notes) == (text, ())


def test_damaged_utf16_is_read_with_a_note() -> None:
    document = text_of("ab".encode("utf-16") + b"c")
    assert document.text == "ab\ufffd"
    assert document.notes == ("decoded as damaged utf-16-le",)


def test_short_legacy_text_is_cp1252_and_says_so() -> None:
    document = text_of("Il a été déçu par “lui”".encode("cp1252"))
    assert document.text == "Il a été déçu par “lui”"
    assert document.notes == ("decoded as cp1252",)


def test_long_legacy_text_is_guessed_and_says_so() -> None:
    text = "これは日本語の文章です。吾輩は猫である。名前はまだ無い。" * 40
    document = text_of(text.encode("shift_jis"))
    assert document.text == text
    assert document.notes[0] in ("decoded as cp932", "decoded as shift_jis")


def test_one_damaged_byte_does_not_garble_a_book() -> None:
    document = text_of(FRENCH.encode() + b"\xff")
    assert document.text == FRENCH + "\ufffd"
    assert document.notes == ("decoded as damaged utf-8",)


def test_line_ends_become_newlines_and_nothing_else_counts_as_one() -> None:
    document = text_of("a\r\nb\rc\u2028d\x85e\nf".encode())
    assert document.text == "a\nb\nc\u2028d\x85e\nf"
    assert document.locate(len(document.text) - 1).line == 4


def test_form_feeds_become_spaces_and_keep_the_lines_right() -> None:
    document = text_of(b"a\n\x0cb\x0bc\nd")
    assert document.text == "a\n b c\nd"
    assert document.notes == ()
    assert document.locate(7).line == 3


def test_controls_are_replaced_and_counted_never_deleted() -> None:
    document = text_of(b"F\x0113 \x1b[1m\tx")
    assert document.text == "F\ufffd13 \ufffd[1m\tx"
    assert document.notes == (
        "2 characters are shown as U+FFFD (control characters, or without a Unicode value)",
    )


def test_lone_surrogates_are_replaced_and_pairs_kept() -> None:
    data = b"\xff\xfe" + "a\ud83db\U0001f600c".encode("utf-16-le", "surrogatepass")
    document = text_of(data)
    assert document.text == "a\ufffdb😀c"
    assert document.notes == (
        "1 character is shown as U+FFFD (control characters, or without a Unicode value)",
    )


def test_a_real_replacement_character_is_not_counted() -> None:
    assert text_of("a\ufffdb".encode()).notes == ()


def test_text_is_not_normalized() -> None:
    text = "x² ﬁeld e\u0301 soft\u00adhyphen op-\nposite opposite"
    assert text_of(text.encode()).text == text


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "void.md").write_bytes(data)
    with pytest.raises(InputError, match=r"^void\.md is empty; "):
        read_now([tmp_path / "void.md"])


@pytest.mark.parametrize(
    ("name", "data"), [("a.dat", b"x" * 8000 + b"\0"), ("a.PNG", b"x"), ("b.docx", b"x")]
)
def test_a_binary_file_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=f"^{name} is binary; "):
        read_now([tmp_path / name])


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"x" * 1_250_000)
    with pytest.raises(InputError, match=r"^big\.txt is too large \(1\.2 MB\); "):
        read_now([tmp_path / "big.txt"], Options(max_file_size=1_249_999))
    assert read_now([tmp_path / "big.txt"], Options(max_file_size=1_250_000)).documents


def test_a_missing_path_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for missing in (tmp_path / "no", tmp_path / "file" / "under", "nul\0"):
        with pytest.raises(InputError, match="^no such file or folder: .*; ") as error:
            read_now([missing])
        assert error.value.exit_code == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file; "):
        read_now([tmp_path / "pipe"])


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # chmod does not stop root, who runs these tests in a container.
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"^a\.txt cannot be read: Permission denied; "):
        read_now([tmp_path / "a.txt"])


def test_standard_input_is_a_file_named_stdin() -> None:
    reading = read_now(["-", "-"], stdin=b"piped")
    assert [(d.name, d.text) for d in reading.documents] == [("stdin", "piped")]
    with pytest.raises(UsageError):
        read_now(["-"])
    with pytest.raises(InputError, match="^stdin is empty; "):
        read_now(["-"], stdin=b"")


def test_files_keep_the_order_given_and_are_read_once(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a")
    again = tmp_path / ".." / tmp_path.name / "c"
    paths: list[str | Path] = [tmp_path / "c", str(tmp_path / "a"), tmp_path / "link", again]
    assert [d.name for d in read_now([*paths, tmp_path / "b"]).documents] == ["c", "a", "b"]


def test_equal_names_grow_until_they_differ(tmp_path: Path) -> None:
    paths = [tmp_path / part for part in ("x/one/a.txt", "y/one/a.txt", "z/two/a.txt", "b.txt")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    names = [d.name for d in read_now(paths).documents]
    assert names == ["x/one/a.txt", "y/one/a.txt", "two/a.txt", "b.txt"]


def test_names_are_fit_for_display(tmp_path: Path) -> None:
    names = [b"caf\xe9.txt", b"caf\xe8.txt", b"new\nline\x1b.txt"]
    paths = [os.fsdecode(os.path.join(os.fsencode(tmp_path), name)) for name in names]
    for path in paths:
        Path(path).write_text("x")
    shown = [d.name for d in read_now(paths).documents]
    assert shown == ["caf\ufffd.txt", "caf\ufffd.txt (2)", "new\ufffdline\ufffd.txt"]


def test_reading_yields_steps_and_returns_the_reading(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    steps = read([tmp_path / "a.txt", "-"], stdin=b"y")
    assert next(steps) == Step("a.txt", 1, 2, "files")
    assert next(steps) == Step("stdin", 2, 2, "files")
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert isinstance(end.value.value, Reading)
    assert len(end.value.value.documents) == 2


def test_importing_is_cheap() -> None:
    heavy = ["pypdf", "pathspec", "charset_normalizer", "torch"]
    code = f"import sys, kvchat.documents; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
