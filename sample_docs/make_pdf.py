#!/usr/bin/env python3
"""Make harbour-handbook.pdf from harbour-handbook.txt (layout only; needs fpdf2).

Markers of the source, each on a line of its own:

    ; note          a comment, left out
    ---             a new page
    @front, @body   this and later pages are labelled i, ii, iii... or 1, 2, 3...
    @title          this page is the title page: centred, without a page number
    @contents       replaced by the chapters of the body and their page numbers
    # text          a chapter heading
    ## text         a section heading

Everything else is running text; blank lines part the paragraphs.
"""

import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "harbour-handbook.txt"
OUTPUT = HERE / "harbour-handbook.pdf"
CREATED = datetime(2025, 4, 1, 9, 0, tzinfo=UTC)
FONT = "Times"


@dataclass
class Page:
    part: str
    number: int
    title: bool = False
    blocks: list = field(default_factory=list)  # (kind, text)

    @property
    def heading(self):
        return next((text for kind, text in self.blocks if kind == "chapter"), "")


def read_source(text):
    """Split the source into pages of (kind, text) blocks."""
    lines = (line.rstrip() for line in text.splitlines() if not line.startswith(";"))
    part, count, pages = "front", {"front": 0, "body": 0}, []
    for chunk in "\n".join(lines).split("\n---\n"):
        words, blocks, title = [], [], False

        for line in chunk.splitlines() + [""]:
            if line in ("@front", "@body"):
                part = line[1:]
            elif line == "@title":
                title = True
            elif line == "@contents":
                blocks.append(("contents", ""))
            elif line.startswith("# "):
                blocks.append(("chapter", line[2:]))
            elif line.startswith("## "):
                blocks.append(("section", line[3:]))
            elif line:
                words.append(line)
            elif words:
                blocks.append(("text", " ".join(words)))
                words.clear()
        count[part] += 1
        pages.append(Page(part, count[part], title, blocks))
    return pages


class Handbook(FPDF):
    def __init__(self):
        super().__init__(unit="mm", format=(148, 210))  # A5
        self.set_margins(18, 18, 18)
        self.set_auto_page_break(True, margin=18)
        self.set_creation_date(CREATED)
        self.set_title("Dunwark Harbour: Operating Handbook")
        self.set_author("Dunwark Harbour Trust (invented)")
        self.set_lang("en")
        self.numbered = False

    def footer(self):
        if self.numbered:
            self.set_y(-13)
            self.set_font(FONT, size=9)
            self.cell(0, 5, self.get_page_label(), align="C")

    def paragraph(self, text, size=11.0, style="", align="L", gap=6.5):
        self.set_font(FONT, style, size)
        self.multi_cell(0, size * 0.72, text, align=align, new_x="LMARGIN", new_y="NEXT")
        self.ln(gap)

    def contents(self, pages):
        self.set_font(FONT, size=11)
        for page in pages:
            if page.part == "body":
                self.cell(self.epw - 12, 7.4, page.heading)
                self.cell(12, 7.4, str(page.number), align="R", new_x="LMARGIN", new_y="NEXT")


def make(pages):
    pdf = Handbook()
    for page in pages:
        # The footer of the page before is drawn by add_page, so the flag changes after it.
        pdf.add_page()
        pdf.numbered = not page.title
        if page.number == 1:
            style = "r" if page.part == "front" else "D"
            pdf.set_page_label(label_style=style, label_start=1)
        if page.title:
            pdf.set_y(58)
        align = "C" if page.title else "L"
        for kind, text in page.blocks:
            if kind == "chapter":
                pdf.paragraph(text, 26 if page.title else 17, "B", align, gap=4)
            elif kind == "section":
                size, gap = (15, 10) if page.title else (12.5, 2)
                pdf.paragraph(text, size, "B", align, gap)
            elif kind == "contents":
                pdf.contents(pages)
            else:
                pdf.paragraph(text, align=align)
    if pdf.page != len(pages):
        raise SystemExit(f"a page overflows: {len(pages)} wanted, {pdf.page} made")
    return pdf


def main():
    pages = read_source(SOURCE.read_text(encoding="utf-8"))
    make(pages).output(OUTPUT)
    print(f"{OUTPUT.name}: {len(pages)} pages", file=sys.stderr)


if __name__ == "__main__":
    main()
