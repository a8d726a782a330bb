"""kvchat in a real terminal: keys, signals, the gauge. A pty drives it and pyte reads the screen, 80 columns wide."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_loaded

from kvchat.ui.interrupt import Interrupt

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

WAIT = 20


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    loaded = tiny_loaded(context=1_000_000)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


class Terminal:
    """A program on a pty of 80 x 24, with what is on the screen."""

    def __init__(self, arguments: list[str], **environment: str):
        self.screen = pyte.Screen(80, 24)
        self.stream = pyte.ByteStream(self.screen)
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "kvchat", *arguments],
            env={**os.environ, "TERM": "xterm-256color", **environment},
            dimensions=(24, 80),
        )
        self.raw = b""

    def _read(self) -> bool:
        """Take in what comes next; False at the end."""
        try:
            data = self.child.read_nonblocking(1 << 16, WAIT)
        except pexpect.EOF:
            return False
        except pexpect.TIMEOUT:
            pytest.fail(f"nothing came for {WAIT} s; the screen was:\n{self.text}", pytrace=False)
        self.raw += data
        self.stream.feed(data)
        if b"\x1b[6n" in data:  # where is the cursor?
            self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
        return True

    def wait(self, pattern: str) -> str:
        """Until the screen shows a match; its text."""
        while not re.search(pattern, self.text, re.S):
            assert self._read(), f"the program ended; its screen was:\n{self.text}"
        return self.text

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).strip()

    def key(self, keys: str) -> None:
        self.child.send(keys)

    def end(self) -> int:
        while self._read():
            pass
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("The code of the red box is 7731.\n" * 40)
    return file


@pytest.fixture
def chat(book: Path, model_folder: Path) -> Iterator[Terminal]:
    terminal = Terminal(["chat", str(book), "-m", str(model_folder), "--kv", "kivi2", "--max-tokens", "6"])
    terminal.wait(">>>")
    yield terminal
    terminal.child.close(force=True)


def test_gauge_and_toolbar(chat: Terminal) -> None:
    text = chat.text
    assert re.search(r"read +█{24} 1,\d{3} of 1,\d{3} tokens", text)
    assert re.search(r"in use +█+░* .*measured: kivi2", text)
    assert "would be" in text
    assert "free" in text
    toolbar = chat.wait("of 1,000,000 tokens").splitlines()[-2:]
    assert "kivi2 3.5 bits" in toolbar[0]
    assert toolbar[0].endswith("x)")
    assert toolbar[1].endswith("free on cpu")


def test_a_question_then_end_of_input(chat: Terminal) -> None:
    chat.key("Which code?\r")
    chat.wait(r"6 answered.*>>>")
    chat.key("\x04")
    assert chat.end() == 0


def test_commands_complete_and_near_misses_are_named(chat: Terminal) -> None:
    chat.key("/memry\r")
    chat.wait("did you mean /memory")
    chat.key("/tok\t")
    chat.wait("/tokens")
    chat.key("\r")
    chat.wait("everything in the cache")
    chat.key("/exit\r")
    assert chat.end() == 0


def test_a_block_is_one_question(chat: Terminal, tmp_path: Path) -> None:
    chat.key('"""first line\r')
    chat.key('second line"""\r')
    chat.wait("6 answered")
    chat.key(f"/save {tmp_path / 'talk.md'}\r")
    chat.wait("wrote 1 turns")
    assert "## first line\nsecond line\n" in (tmp_path / "talk.md").read_text()


def test_ctrl_c_clears_the_line_and_twice_leaves(chat: Terminal) -> None:
    chat.key("half a question\x03")
    chat.wait(r">>>")
    chat.key("\x03\x03")
    assert chat.end() == 130


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(book: Path, model_folder: Path) -> None:
    terminal = Terminal(["chat", str(book), "-m", str(model_folder), "--max-tokens", "100000"])
    terminal.wait(">>>")
    terminal.key("Which code?\r")
    terminal.wait(r"Which code\?.*\n.{20}")
    terminal.key("\x03")
    terminal.wait(r"\(stopped\).*>>>")
    terminal.key("/tokens\r")
    terminal.wait("everything in the cache")
    terminal.key("/exit\r")
    assert terminal.end() == 0


def test_ctrl_c_twice_in_an_answer_leaves(book: Path, model_folder: Path) -> None:
    terminal = Terminal(["chat", str(book), "-m", str(model_folder), "--max-tokens", "100000"])
    terminal.wait(">>>")
    terminal.key("Which code?\r")
    terminal.wait(r"Which code\?.*\n.{20}")
    terminal.key("\x03")
    terminal.wait(r"\(stopped\)")
    terminal.key("\x03\x03")
    assert terminal.end() == 130


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_interrupt_asks_and_the_second_raises() -> None:
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_reading_says_how_far_it_came(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 400_000)
    terminal = Terminal(["ask", str(tmp_path / "long.txt"), "why?", "-m", str(model_folder), "--plain"])
    terminal.wait("tokens/s")
    terminal.key("\x03")
    text = terminal.wait(r"stopped after [\d,]+ of 400,\d{3} tokens")
    assert "Traceback" not in text
    assert terminal.end() == 130


def test_a_half_read_document_is_read_on(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 60_000)
    terminal = Terminal(
        ["chat", str(tmp_path / "long.txt"), "-m", str(model_folder), "--plain", "--max-tokens", "3"]
    )
    terminal.wait("tokens/s")
    terminal.key("\x03")
    terminal.wait(r"stopped after.*goes on from there.*>>>")
    terminal.key("why?\r")
    terminal.wait("3 answered")
    terminal.key("/exit\r")
    assert terminal.end() == 0


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_nothing_fancy_where_it_is_not_wanted(book: Path, model_folder: Path, variable: str) -> None:
    value = {"NO_COLOR": "1", "TERM": "dumb"}[variable]
    arguments = ["ask", str(book), "why?", "-m", str(model_folder), "--max-tokens", "3"]
    terminal = Terminal(arguments, **{variable: value})
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw


def test_a_reader_that_goes_away_leaves_no_traceback(book: Path, model_folder: Path) -> None:
    command = f"{sys.executable} -m kvchat ask {book} why? -m {model_folder} -q --max-tokens 400 | head -c 1"
    child = pexpect.spawn("/bin/sh", ["-c", command], timeout=WAIT)
    child.expect(pexpect.EOF)
    assert b"Traceback" not in child.before
    assert b"Broken" not in child.before
