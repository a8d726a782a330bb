"""PDF files: characters, layout, pages and their labels, damage, encryption."""

import logging
from pathlib import Path

import pytest
from pdfs import IMAGE, assemble, encrypted, lines, pdf

from kvchat.documents import Document, Options, Span, Step, read, read_now
from kvchat.documents.hyphens import join_broken_words, resolve_soft_hyphens
from kvchat.errors import InputError, UsageError

ABC = {code: f"{code:04X}" for code in b"Fabcdefghijklmnopqrstuvwxyz 0123456789"}
HELLO = pdf(lines(b"hello world"))


def read_pdf(data: bytes, options: Options | None = None) -> Document:
    (document,) = read_now(["-"], options or Options(), stdin=data).documents
    return document


def refusal(data: bytes, options: Options | None = None) -> str:
    with pytest.raises(InputError) as error:
        read_pdf(data, options)
    message = str(error.value)
    assert "\n" not in message
    assert "; " in message
    return message


@pytest.mark.parametrize("name", ["a.pdf", "A.PDF", "unnamed", "a.txt"])
def test_a_pdf_never_goes_down_the_text_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(HELLO)
    (document,) = read_now([tmp_path / name]).documents
    assert (document.name, document.text, document.notes) == (name, "hello world", ())
    assert document.spans == (Span(0, 11, page=1, label="1"),)


def test_junk_before_the_header_is_still_a_pdf() -> None:
    assert read_pdf(b"junk\r\n" + HELLO).text == "hello world"


def test_text_about_pdfs_is_no_pdf() -> None:
    assert read_pdf(b'HEADER = b"%PDF-1.7"').text == 'HEADER = b"%PDF-1.7"'


def test_text_named_pdf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.pdf").write_text("<html>not found</html>")
    with pytest.raises(InputError, match=r"^page\.pdf is a damaged PDF "):
        read_now([tmp_path / "page.pdf"])


# Characters


def test_split_surrogates_are_joined_and_lone_ones_replaced() -> None:
    unicode = ABC | {1: "D83D", 2: "DE00"}
    document = read_pdf(pdf(lines(rb"a\001\002b a\001b"), unicode=unicode))
    assert document.text == "a😀b a\ufffdb"
    assert document.notes == (
        "1 character is shown as U+FFFD (control characters, or without a Unicode value)",
    )


@pytest.mark.parametrize("unicode", [None, ABC | {1: "0000", 2: "000C"}])
def test_glyphs_without_a_value_are_never_deleted(unicode: dict[int, str] | None) -> None:
    document = read_pdf(pdf(lines(rb"F\00113 F\002a"), unicode=unicode))
    assert document.text == "F\ufffd13 F\ufffda"
    assert document.notes == (
        "2 characters are shown as U+FFFD (control characters, or without a Unicode value)",
    )


def test_ligatures_are_spelled_out_and_nothing_else_is_normalized() -> None:
    unicode = ABC | {i: f"FB{i:02X}" for i in range(7)} | {8: "00B2"}
    data = pdf(lines(rb"\000 \001 \002 \003 \004 \005 \006 10\010"), unicode=unicode)
    assert read_pdf(data).text == "ff fi fl ffi ffl st st 10²"


def test_kerning_loses_no_letter() -> None:
    data = pdf(b"BT /F1 12 Tf 72 720 Td [(Be) -120 (ir) -260 (a Rio)] TJ ET")
    assert read_pdf(data).text.replace(" ", "") == "BeiraRio"


# Hyphens


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("op-\nposite, opposite", "opposite, opposite"),
        ("op- \nposite. Opposite", "opposite. Opposite"),
        ("Op-\nposite opposite", "Opposite opposite"),
        ("op-\nposite", "op-\nposite"),
        ("op-\nposite opposites", "op-\nposite opposites"),
        ("state-of-\nthe-art", "state-of-\nthe-art"),
        ("state-of-\nthe-art state-of-the-art", "state-of-the-art state-of-the-art"),
        ("re-\nform reform re-form", "re-\nform reform re-form"),
        ("F-\n13", "F-\n13"),
        ("F-\n13 F13", "F-\n13 F13"),
        ("F-\n13 F-13", "F-13 F-13"),
        ("10-\n20 1020", "10-\n20 1020"),
        ("X-\nRay XRay", "X-\nRay XRay"),
        ("v-\nb2 vb2", "v-\nb2 vb2"),
        ("a -\nb ab", "a -\nb ab"),
        ("- one\n- two", "- one\n- two"),
    ],
)
def test_a_broken_word_is_joined_only_on_evidence(text: str, joined: str) -> None:
    assert join_broken_words(text) == joined


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("op\xad\nposite", "opposite"),
        ("co\xadoperate", "cooperate"),
        ("F\xad13 F\xad\n13", "F-13 F-\n13"),
        ("Lennard\xadJones", "Lennard-Jones"),
        ("3\xadfold", "3-fold"),
        ("end\xad", "end-"),
    ],
)
def test_soft_hyphens_go_only_from_within_words(text: str, resolved: str) -> None:
    assert resolve_soft_hyphens(text) == resolved


def test_hyphens_of_a_pdf_are_resolved_across_lines_and_pages() -> None:
    data = pdf(lines(b"the op-", b"posite, op-"), IMAGE, lines(b"posite or opposite"))
    document = read_pdf(data)
    assert document.text == "the opposite, opposite or opposite"
    assert [document.text[s.start : s.end] for s in document.spans] == [
        "the opposite, op",
        "",
        "posite or opposite",
    ]


def test_soft_hyphens_of_a_pdf_are_resolved() -> None:
    data = pdf(lines(rb"op\001", rb"posite F\00113"), unicode=ABC | {1: "00AD"})
    assert read_pdf(data).text == "opposite F-13"


# Pages


def test_pages_are_joined_by_a_newline_and_spans_are_exact() -> None:
    document = read_pdf(pdf(lines(b"the end of"), lines(b"a sentence", b"and more")))
    assert document.text == "the end of\na sentence\nand more"
    assert document.spans == (Span(0, 10, page=1, label="1"), Span(11, 30, page=2, label="2"))
    places = [document.locate(offset).page for offset in (0, 9, 10, 11, 30)]
    assert places == [1, 1, 1, 2, 2]


def test_labels_are_those_of_the_viewer() -> None:
    labels = b"[0 << /S /r >> 2 << /S /D /St 1 >>]"
    document = read_pdf(pdf(*[lines(b"text")] * 4, labels=labels))
    assert [str(document.locate(span.start)) for span in document.spans] == [
        "p. i (PDF page 1)",
        "p. ii (PDF page 2)",
        "p. 1 (PDF page 3)",
        "p. 2 (PDF page 4)",
    ]


def test_empty_labels_are_left_out() -> None:
    document = read_pdf(pdf(lines(b"text"), labels=b"[0 << /P () >>]"))
    assert str(document.locate(0)) == "PDF page 1"


def test_labels_that_cannot_be_read_cost_only_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdf

    def fail(self: pypdf.PdfReader) -> list[str]:
        raise KeyError("/Nums")

    monkeypatch.setattr(pypdf.PdfReader, "page_labels", property(fail))
    assert str(read_pdf(HELLO).locate(0)) == "PDF page 1"


def test_too_few_labels_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdf

    monkeypatch.setattr(pypdf.PdfReader, "page_labels", property(lambda self: ["x\ud800"]))
    document = read_pdf(pdf(lines(b"a"), lines(b"b")))
    assert [span.label for span in document.spans] == ["x\ufffd", None]


def test_pages_without_text_are_the_first_note() -> None:
    text = lines(rb"F\00113")
    document = read_pdf(pdf(text, IMAGE, text, IMAGE, IMAGE))
    assert document.notes[0] == "pages 2, 4-5 have no text (images?)"
    assert len(document.spans) == 5
    assert document.locate(4).page == 1
    assert document.locate(5).page == 3
    assert document.locate(len(document.text)).page == 3


def test_a_scan_is_refused() -> None:
    message = "stdin has no text layer (2 pages); run ocrmypdf on it first"
    assert refusal(pdf(IMAGE, IMAGE)) == message
    assert "(1 page)" in refusal(pdf(lines(b"  ")))


@pytest.mark.parametrize("pages", [b"/Kids [] /Count 0", b"/Count 3", b""])
def test_a_pdf_without_pages_is_refused(pages: bytes) -> None:
    catalog = b"<< /Type /Catalog /Pages 2 0 R >>"
    data = assemble([catalog, b"<< /Type /Pages %b >>" % pages])
    assert refusal(data).startswith("stdin has no pages; ")


@pytest.mark.parametrize("data", [b"%PDF-1.7", b"%PDF-1.7\n" + b"x" * 3000, HELLO[:40]])
def test_a_damaged_pdf_is_refused(data: bytes) -> None:
    assert refusal(data).startswith("stdin is a damaged PDF (")


def test_an_empty_pdf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    with pytest.raises(InputError, match=r"^a\.pdf is empty; "):
        read_now([tmp_path / "a.pdf"])


@pytest.mark.parametrize("error", [KeyError("/Font"), RecursionError(), ZeroDivisionError()])
def test_one_bad_page_is_a_note(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import pypdf

    extract = pypdf.PageObject.extract_text

    def fail(self: pypdf.PageObject, **options: str) -> str:
        text = extract(self, **options)
        if "bad" in text:
            raise error
        return text

    monkeypatch.setattr(pypdf.PageObject, "extract_text", fail)
    document = read_pdf(pdf(lines(b"one"), lines(b"bad"), IMAGE, lines(b"four")))
    assert document.text == "one\nfour"
    assert document.notes == (
        "page 3 has no text (image?)",
        f"page 2 could not be read ({type(error).__name__})",
    )
    assert "no readable page (1 page: " in refusal(pdf(lines(b"bad")))


def test_flaws_that_pypdf_works_around_stay_silent(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert read_pdf(HELLO[: HELLO.index(b"xref")] + HELLO[-60:]).text == "hello world"
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_each_page_is_a_step() -> None:
    steps = list(read(["-"], stdin=pdf(lines(b"a"), IMAGE, lines(b"b")), options=Options()))
    pages = [Step("stdin", done, 3, "pages") for done in (1, 2, 3)]
    assert steps == [*pages, Step("stdin", 1, 1, "files")]


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [("2", [2]), ("1-3", [1, 2, 3]), ("4, 1-2", [1, 2, 4]), ("1-2,2-3", [1, 2, 3])],
)
def test_pages_choose_by_position(spec: str, chosen: list[int]) -> None:
    data = pdf(*(lines(b"page %d" % n) for n in (1, 2, 3, 4)), labels=b"[0 << /S /r >>]")
    document = read_pdf(data, Options(pages=spec))
    assert [span.page for span in document.spans] == chosen
    assert document.text == "\n".join(f"page {n}" for n in chosen)


@pytest.mark.parametrize("spec", ["", "0", "2-1", "1-", "-1", "a", "1;2", "1,", "٣", "9" * 5000])
def test_malformed_pages_are_a_usage_error_even_without_a_pdf(spec: str) -> None:
    with pytest.raises(UsageError):
        read_now(["-"], Options(pages=spec), stdin=b"text")


@pytest.mark.parametrize(
    ("spec", "words"), [("0", "count from 1"), ("3-1", "falls from 3 to 1"), ("x", "no list")]
)
def test_what_is_wrong_with_pages_is_said(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_now(["-"], Options(pages=spec), stdin=b"text")


def test_pages_beyond_the_last_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="page 999,999,999 of a PDF of 1 page"):
        read_pdf(HELLO, Options(pages="1-999999999"))


# Encryption


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
class TestEncryption:
    def test_the_empty_password_is_tried(self, algorithm: str) -> None:
        for password in (None, "needless"):
            data = encrypted(HELLO, "", algorithm)
            assert read_pdf(data, Options(password=password)).text == "hello world"

    def test_user_and_owner_passwords_open(self, algorithm: str) -> None:
        for password in ("user", "owner"):
            data = encrypted(HELLO, "user", algorithm)
            assert read_pdf(data, Options(password=password)).text == "hello world"

    @pytest.mark.parametrize("password", [None, "wr0ng", "wr0ng \u4e2d", ""])
    def test_refusals_say_what_to_pass_and_show_no_password(
        self, algorithm: str, password: str | None
    ) -> None:
        message = refusal(encrypted(HELLO, "user", algorithm), Options(password=password))
        assert message.startswith("stdin is encrypted")
        assert "--password" in message
        assert "KVCHAT_PDF_PASSWORD" in message
        assert "wr0ng" not in message
        assert "wr0ng" not in repr(Options(password="wr0ng"))
        assert "\u4e2d" not in message


def test_aes_without_cryptography_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdf
    from pypdf.errors import DependencyError

    def fail(*arguments: object) -> None:
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf.PdfReader, "__init__", fail)
    assert refusal(HELLO).endswith("pip install 'pypdf[crypto]'")


# Columns


def columns(*, row_by_row: bool) -> bytes:
    left = [b"1 0 0 1 72 %d Tm (left column %d) Tj" % (720 - 14 * i, i) for i in range(12)]
    right = [b"1 0 0 1 330 %d Tm (right column %d) Tj" % (720 - 14 * i, i) for i in range(12)]
    rows = [part for row in zip(left, right, strict=True) for part in row]
    texts = rows if row_by_row else left + right
    return pdf(b"BT /F1 12 Tf " + b" ".join(texts) + b" ET")


def test_columns_that_are_mixed_are_noted() -> None:
    document = read_pdf(columns(row_by_row=True))
    assert document.notes == ("looks like two columns; try --layout",)


def test_layout_keeps_columns_apart() -> None:
    document = read_pdf(columns(row_by_row=True), Options(layout=True))
    assert document.notes == ()
    assert all("     right column" in line for line in document.text.split("\n"))


def test_a_table_of_contents_is_no_second_column() -> None:
    rows = [
        b"1 0 0 1 72 %d Tm (Chapter %d) Tj 1 0 0 1 430 %d Tm (%d) Tj" % (720 - 14 * i, i, 720 - 14 * i, i)
        for i in range(12)
    ]
    assert read_pdf(pdf(b"BT /F1 12 Tf " + b" ".join(rows) + b" ET")).notes == ()


def test_columns_in_reading_order_and_plain_pages_are_not_noted() -> None:
    assert read_pdf(columns(row_by_row=False)).notes == ()
    assert read_pdf(pdf(lines(*[b"one column of text"] * 12))).notes == ()
