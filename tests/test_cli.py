"""The commands as a user meets them: streams, exit codes, one line for each thing that goes wrong."""

import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pdfs import lines, pdf
from tiny import END, spelled, tiny_loaded, tiny_tokenizer

from kvchat import calibrations, places
from kvchat.cli import main
from kvchat.engine import Engine
from kvchat.kv.calibration import NAME
from kvchat.kv.format import PRESETS
from kvchat.store import Store
from kvchat.ui.screen import clean

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    loaded = tiny_loaded(context=2048)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run kvchat in this process; gives its exit code, stdout and stderr."""

    def run(*arguments: Any, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["kvchat", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("The code of the red box is 7731.\n" * 20)
    return file


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the model answer every question with a text, or with several in turn, whatever it computes."""

    def says(*texts: str) -> None:
        answers = [[*spelled(tiny_tokenizer(), text), END] for text in texts]
        ids = itertools.cycle(itertools.chain.from_iterable(answers))
        monkeypatch.setattr(Engine, "_choose", lambda *_: next(ids))

    return says


WRONG = [
    (["ask"], 2, "nothing to read"),
    (["ask", "{missing}.txt"], 3, "no such file"),
    (["ask", "{book}", "other.pdf"], 3, "no such file or folder: other.pdf"),
    (["ask", "{empty}", "why?"], 3, "empty"),
    (["ask", "{book}", ""], 2, "question"),
    (["ask", "-", "why?"], 3, "empty"),
    (
        ["ask", "{book}", "why?", "--kv", "kivi9"],
        2,
        "fp16, kivi4, kvquant4, kivi3, kvquant3, kvchat3, kivi2, kvquant2, kvchat2",
    ),
    (["ask", "{book}", "why?", "--kv", "kivi2:k=5"], 2, "5 bits"),
    (["ask", "{book}", "why?", "--kv", "kivi2:colour=3"], 2, "no setting 'colour'"),
    (["ask", "{book}", "why?", "--device", "tpu:9"], 2, "tpu:9"),
    (["ask", "{book}", "why?", "--max-file-size", "big"], 2, "'big' is no size"),
    (["ask", "{book}", "why?", "-m", "nosuch"], 5, "nosuch"),
    (["ask", "{book}", "why?", "-m", "smollm2", "--offline"], 5, "kvchat models pull smollm2"),
    (["ask", "{book}", "why?", "-m", "no/such", "--offline"], 5, "kvchat models pull no/such"),
    (["ask", "{book}", "why?", "-m", "{missing}.gguf"], 5, "no such file"),
    (["chat", "-"], 2, "stdin"),
    (["ask", "{book}", "  "], 2, "the question is empty"),
    (["ask", "", "why?"], 2, "a path is empty"),
    (["ask", "{book}", "Wh\udcffen?"], 2, "not UTF-8"),
    (["ask", "{book}", "why?", "-s", "\udcff"], 2, "not UTF-8"),
    (["ask", "{book}", "why?", "--temp", "1e-40"], 2, "temperature"),
    (["ask", "{book}", "why?", "--no-cache", "--refresh"], 2, "contradict"),
    (["ask", "{book}", "why?", "--max-size", "much"], 2, "'much' is no size"),
    (["ask", "{book}", "why?", "-m", ""], 5, "empty"),
    (["ask", "{book}", "long " * 400], 4, "the question needs"),
    (["ingest", "{book}", "--no-cache"], 2, "--dry-run"),
    (["ingest"], 2, "nothing to read"),
    (["cache", "show", "0123"], 2, "no stored cache"),
    (["cache", "rm"], 2, "--all"),
    (["compare-memory"], 2, "--tokens N"),
    (["compare-memory", "{book}", "--tokens", "5"], 2, "either"),
    (["compare-memory", "--tokens", "5", "--plot", "x.jpg"], 2, "PNG"),
    (["compare-memory", "--tokens", "5", "--measure"], 2, "document"),
    (["compare-memory", "--tokens", "5", "--question", "why?"], 2, "--measure asks"),
    (
        ["ask", "{book}", "why?", "--kv", "kvchat2:k=4"],
        2,
        "kvchat2 has no setting 'k'; it takes window, sink, rope",
    ),
    (["ask", "{book}", "why?", "--kv", "kivi2:k=4,k=2"], 2, "twice"),
    (["cache", "show"], 2, "Missing argument 'ID'; see kvchat cache show --help"),
    (["cache", "rm", "--all", "c8"], 2, "or name some"),
    (["calibrate", "--pieces", "0"], 2, "see kvchat calibrate --help"),
    (["models", "pull", "nosuch"], 5, "nosuch"),
    (["models", "info", "{book}"], 5, "book.txt"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), WRONG, ids=lambda a: " ".join(a) if isinstance(a, list) else ""
)
def test_what_goes_wrong_ends_in_one_line(
    run: Run, book: Path, model_folder: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "empty.txt").touch()
    places_ = {"missing": tmp_path / "missing", "book": book, "empty": tmp_path / "empty.txt"}
    arguments = [a.format(**places_) for a in arguments]
    if "-m" not in arguments and arguments[0] in ("ask", "chat", "ingest", "compare-memory"):
        arguments += ["-m", str(model_folder)]
    result = run(*arguments)
    assert result.code == code
    assert result.out == ""
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("kvchat: error: ")
    assert words in last
    assert "Traceback" not in result.err


def test_a_home_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, book: Path
) -> None:
    (tmp_path / "junk.gguf").write_text("junk")
    monkeypatch.setenv("KVCHAT_HOME", str(book / "below-a-file"))
    result = run("models", "pull", tmp_path / "junk.gguf")
    assert result.code == 1
    assert "set KVCHAT_HOME" in result.err


@pytest.mark.parametrize("arguments", [["bogus"], ["ask", "--temp", "-1"], ["ask", "--nosuch"]])
def test_usage_errors_end_in_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_answer_alone_on_stdout(run: Run, book: Path, model_folder: Path) -> None:
    result = run("ask", book, "Which code?", "-m", model_folder, "--max-tokens", 8, "--kv", "kivi2")
    assert result.code == 0
    assert "\x1b" not in result.out + result.err
    assert "kivi2 3.5 bits" in result.err
    assert "fp16 would be" in result.err
    assert "tokens/s" in result.err
    quiet = run("ask", book, "Which code?", "-m", model_folder, "--max-tokens", 8, "--kv", "kivi2", "-q")
    assert quiet.out == result.out
    assert "kivi2" not in quiet.err


def test_json_holds_what_the_text_says(run: Run, book: Path, model_folder: Path) -> None:
    arguments = ("ask", book, "Which code?", "-m", model_folder, "--max-tokens", 8)
    text, report = run(*arguments).out, json.loads(run(*arguments, "--json").out)
    assert clean(report["answer"]) == text.removesuffix("\n")
    assert report["stopped"] == "max-tokens"
    assert report["kv"]["format_name"] == "kivi4"
    assert report["kv"]["ratio"] == report["kv"]["fp16"] / report["kv"]["in_use"]
    assert report["documents"][0]["name"] == "book.txt"


def test_a_cut_answer_is_said(run: Run, book: Path, model_folder: Path) -> None:
    result = run("ask", book, "Which code?", "-m", model_folder, "--max-tokens", 3)
    assert "cut after 3 tokens" in result.err


def test_question_and_document_from_stdin(run: Run, book: Path, model_folder: Path) -> None:
    options = ("-m", model_folder, "--max-tokens", 8, "-q")
    expected = run("ask", book, "Which code?", *options).out
    assert run("ask", book, *options, stdin="Which code?\n").out == expected
    assert run("ask", "-f", book, "Which code?", *options).out == expected
    assert run("ask", "-", "Which code?", *options, stdin=book.read_text()).code == 0
    assert run("ask", "-", *options, stdin="text").code == 2  # which is it, document or question?


def test_too_long_is_refused_with_both_numbers_before_the_model_opens(
    run: Run, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvchat.models.load.load", lambda *_: pytest.fail("the model was opened"))
    (tmp_path / "long.txt").write_text("x" * 3000)
    result = run("ask", tmp_path / "long.txt", "why?", "-m", model_folder)
    assert result.code == 4
    assert "3,168 tokens" in result.err  # with the prompt around them
    assert "2,048" in result.err


def test_control_characters_never_reach_the_terminal(
    run: Run, book: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ok \x1b[2J\x1b]0;x\x07 [/x] [bold] :smile: a\tb\u009b"
    monkeypatch.setattr("kvchat.session.Session.ask", lambda self, *_: self._fake(text))
    turn = SimpleNamespace(answer=text, tokens=1, stopped="", tokens_per_second=1.0)

    def fake(self: Any, text: str) -> Any:
        self.turns.append(turn)
        yield text

    monkeypatch.setattr("kvchat.session.Session._fake", fake, raising=False)
    out = run("ask", book, "why?", "-m", model_folder, "-q").out
    assert out == "ok \ufffd[2J\ufffd]0;x\ufffd [/x] [bold] :smile: a\tb\ufffd\n"


def test_chat_from_a_pipe(run: Run, book: Path, model_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    lines = [
        "Which code?",
        "/memory",
        "/tokens",
        "/files",
        "/mem",
        "//slash",
        "/regen",
        "/clear",
        "/set temp 0.5",
        "/CLEAR",
        "/clear now",
        "/nonsense",
        "/etc/hosts is a path",
    ]
    lines += [
        *("/set temp -1", "/set top-p 5", "/set max-tokens 0", "/set seed -3", "/set temp nan", "/set kv no"),
        "/set temp x",
        "/system Be brief.",
        "Again?",
        f"/save {saved}",
        f"/save {saved}",
        "/exit",
        "never read",
    ]
    result = run("chat", book, "-m", model_folder, "--max-tokens", 4, stdin="\n".join(lines))
    assert result.code == 0
    assert "did you mean /memory?" in result.err
    assert result.err.count("the conversation is forgotten") == 2
    assert "/clear takes nothing" in result.err
    assert "unknown command /nonsense" in result.err
    assert "unknown command /etc" not in result.err
    assert result.err.count("tokens prefilled") == 2  # at the start and after /system, not after every answer
    assert "in use (measured)" in result.out
    assert "everything in the cache" in result.out
    assert "book.txt" in result.out
    assert "'x' is no value for temp" in result.err
    for wrong in (
        "-1.0 is no value for temp",
        "5.0 is no",
        "0 is no",
        "-3 is no",
        "nan is no",
        "KV format 'no'",
    ):
        assert wrong in result.err
    assert "exists already" in result.err
    assert "## Again?" in saved.read_text()
    assert "Which code?" not in saved.read_text()  # the system prompt started a new conversation


def test_a_conversation_goes_on(run: Run, book: Path, model_folder: Path) -> None:
    # numbers in float32: a random model's words would turn on what quantizing in other steps changes
    model = ("-m", model_folder, "--max-tokens", 6, "--kv", "kivi4:k=32,v=32")
    nothing = run("chat", "-c", *model)
    assert nothing.code == 2
    assert "no conversation to go on with" in nothing.err
    run("chat", book, *model, stdin="Which code?\nAnd the blue one?\n")
    whole = run("chat", book, *model, stdin="Which code?\nAnd the blue one?\nAnd the green one?").out
    third = whole.splitlines()[-1]
    run("chat", book, *model, stdin="Which code?\nAnd the blue one?\n")
    goes_on = run("chat", "-c", *model, stdin="/tokens\n/regen\nAnd the green one?\n")
    assert "going on after 2 turns" in goes_on.err
    assert ">>> And the blue one?" in goes_on.err
    assert "read from cache" in goes_on.err
    assert goes_on.out.splitlines()[-1] == third
    again = run("chat", "-c", book, *model, stdin="/clear\n")
    assert "going on after 3 turns" in again.err
    assert run("chat", "-c", book, *model).code == 2
    other = run("chat", "-c", book.parent, *model)
    assert "about these files" in other.err


def test_a_conversation_never_shrinks_unasked(
    run: Run, book: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = ("-m", model_folder, "--max-tokens", 4)
    run("chat", book, *model, stdin="One?\nTwo?\nThree?\n")
    [file] = places.conversations().glob("*.json")
    value = json.loads(file.read_text())
    value["turns"][1]["question"] = "long " * 400  # no room for it in the model's context
    file.write_text(json.dumps(value))
    result = run("chat", "-c", *model, stdin="Four?\n")
    assert "2 turns are kept on disk" in result.err
    kept = [turn["question"][:6] for turn in json.loads(file.read_text())["turns"]]
    assert kept == ["One?", "long l", "Three?", "Four?"]


@pytest.mark.parametrize(
    ("part", "wrong"),
    [("turns", [{"question": "q", "answer": 5, "ids": []}]), ("turns", [{"question": "q", "answer": "a", "ids": [-1]}]),
     ("paths", [5]), ("system", 7), ("options", {"pages": 7}), ("options", {"max_file_size": "q"})],
)  # fmt: skip
def test_a_conversation_that_makes_no_sense_is_said(
    run: Run, book: Path, model_folder: Path, part: str, wrong: Any
) -> None:
    run("chat", book, "-m", model_folder, "--max-tokens", 4, stdin="One?\n")
    [file] = places.conversations().glob("*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: wrong}))
    result = run("chat", "-c", "-m", model_folder)
    assert result.code == 1
    assert "remove it and leave out -c" in result.err


def test_a_conversation_goes_on_without_its_file(run: Run, book: Path, model_folder: Path) -> None:
    model = ("-m", model_folder, "--max-tokens", 6)
    run("chat", book, *model, stdin="Which code?\n")
    book.unlink()
    result = run("chat", "-c", *model, stdin="/files\n")
    assert "as they were when they were stored" in result.err
    assert "book.txt" in result.out
    assert run("chat", "-c", "--no-cache", *model).code == 3


def test_a_conversation_that_is_not_to_be_kept_is_not(run: Run, book: Path, model_folder: Path) -> None:
    run("chat", book, "-m", model_folder, "--no-history", "--max-tokens", 4, stdin="Which code?\n")
    assert not places.conversations().exists()
    run("chat", book, "-m", model_folder, "--max-tokens", 4, stdin="Which code?\n")
    [file] = places.conversations().glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert "secret" not in file.read_text()
    file.write_text("{}")
    assert "remove it" in run("chat", "-c", "-m", model_folder).err


# --- quotes -------------------------------------------------------------------------------------------------

Says = Callable[..., None]


def test_quotes_are_checked_under_the_answer(run: Run, book: Path, model_folder: Path, says: Says) -> None:
    arguments = ("ask", book, "Which code?", "-m", model_folder)
    answer = "> The code of the red box is 7731.\n7731, and not 7732."
    says(answer)
    result = run(*arguments)
    assert result.code == 0
    assert result.out == answer + "\n"
    *_, quote, number, wrong, statistics = result.err.splitlines()
    assert quote == "1 verified, book.txt:1 (the first of 20): The code of the red box is 7731."
    assert number == "2 verified, book.txt:1 (the first of 20): 7731"
    assert wrong == "3 not in the document: 7732"
    assert "answered" in statistics
    quiet = run(*arguments, "-q")
    assert quiet.err == "3 not in the document: 7732\n"


def test_quotes_in_json(run: Run, book: Path, model_folder: Path, says: Says) -> None:
    says("> the code of the red Box is 7731\n7730")
    result = run("ask", book, "Which code?", "-m", model_folder, "--json", "--strict")
    assert result.code == 6
    quote, number = json.loads(result.out)["quotes"]
    assert (quote["kind"], quote["outcome"], quote["text"]) == (
        "quote",
        "repaired",
        "the code of the red Box is 7731",
    )
    assert quote["passage"] == {
        "where": "book.txt:1",
        "document": "book.txt",
        "line": 1,
        "page": None,
        "label": None,
        "start": 0,
        "end": 31,
        "source": "The code of the red box is 7731",
    }
    assert number == {
        "text": "7730",
        "kind": "number",
        "outcome": "not in the document",
        "occurrences": 0,
        "passage": None,
    }


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("> The code of the red box is 7731.\n7731", 0),
        ("The document does not say.", 0),
        ("> The code of the red box is 7732.", 6),
        ("> The code of the Red box is 7731.", 6),
        ("Ask Rosalind Meek", 6),
    ],
)
def test_strict(run: Run, book: Path, model_folder: Path, says: Says, answer: str, code: int) -> None:
    says(answer)
    result = run("ask", book, "Which code?", "-m", model_folder, "--strict")
    assert result.code == code
    assert result.out == answer + "\n"
    assert ("kvchat: error: 1 of 1 quotes" in result.err) == (code == 6)
    assert run("ask", book, "Which code?", "-m", model_folder).code == 0


RIGHT, WRONG = "> The code of the red box is 7731.\n7731", "> The code of the red box is 9999."


def test_a_second_look_is_said_and_stdout_holds_what_stands(
    run: Run, book: Path, model_folder: Path, says: Says
) -> None:
    arguments = ("ask", book, "What is the code of the red box?", "-m", model_folder)
    says(WRONG, RIGHT)
    result = run(*arguments, "--strict")
    assert (result.code, result.out) == (0, RIGHT + "\n")
    assert "1 of 1 not verified: asked again with book.txt:" in result.err
    says(WRONG, "> No box is red.")
    result = run(*arguments, "--strict")
    assert (result.code, result.out) == (6, WRONG + "\n")
    assert "the first answer stands" in result.err
    says(WRONG, RIGHT)
    result = run(*arguments, "--reread", "never")
    assert result.out == WRONG + "\n" and "asked again" not in result.err
    assert run(*arguments, "--reread", "sometimes").code == 2


def test_a_second_look_in_json(run: Run, book: Path, model_folder: Path, says: Says) -> None:
    arguments = ("ask", book, "What is the code of the red box?", "-m", model_folder, "--json")
    says(WRONG, RIGHT)
    found = json.loads(run(*arguments).out)
    assert (found["answer"], found["quotes"][0]["outcome"]) == (RIGHT, "verified")
    assert found["reread"]["first_answer"] == WRONG and found["reread"]["taken"] is True
    assert all(where.startswith("book.txt:") for where in found["reread"]["passages"])
    says("The document does not say.", WRONG)
    found = json.loads(run(*arguments).out)
    assert found["answer"] == "The document does not say." and found["reread"]["taken"] is False
    says(RIGHT)
    assert json.loads(run(*arguments).out)["reread"] is None
    found = json.loads(run(*arguments, "--reread", "always").out)
    assert found["reread"]["first_answer"] is None and found["reread"]["passages"]


def test_a_chat_goes_on_after_a_second_look(run: Run, book: Path, model_folder: Path, says: Says) -> None:
    says(WRONG, RIGHT)
    arguments = ("chat", book, "-m", model_folder)
    result = run(*arguments, stdin="What is the code of the red box?\n/cite\n")
    assert result.out.startswith(RIGHT + "\n1 verified")
    [file] = places.conversations().glob("*.json")
    [turn] = json.loads(file.read_text())["turns"]
    assert turn["question"] == "What is the code of the red box?"
    assert "The code of the red box is 7731." in turn["context"]
    says(RIGHT)
    result = run(*arguments, "-c", stdin="Sure?\n")
    assert ">>> What is the code of the red box?\n" in result.err


def test_strict_needs_a_question(run: Run, book: Path, model_folder: Path) -> None:
    assert run("ask", book, "-m", model_folder, "--strict").code == 2


def test_half_a_word_of_a_cut_answer_is_not_looked_up(
    run: Run, book: Path, model_folder: Path, says: Says
) -> None:
    answer = "> The code of the red box is 7731."
    says(answer)
    cut = ("ask", book, "Which code?", "-m", model_folder, "--strict", "--max-tokens", len(answer) - 2)
    result = run(*cut)
    assert result.code == 0
    assert "1 verified, book.txt:1 (the first of 20): The code of the red box is\n" in result.err


def test_nothing_of_a_quote_drives_the_terminal(
    run: Run, tmp_path: Path, model_folder: Path, says: Says
) -> None:
    file = tmp_path / "evil\x1b[2J.txt"
    file.write_text("The code of \x9b2J\u202e [/x] [bold] :smile: \x1b[31mred box is 7731.\n")
    says("> code of \x9b2J\u202e [/x] [bold] :smile:\n> the code of \x1b[31mred box is 7731 \x1b]0;x\x07")
    result = run("chat", file, "-m", model_folder, stdin="Which?\n/cite\n/source 1\n/source 2\n")
    assert not set("\x1b\x9b\u202e\x07") & set(result.out + result.err)
    assert "[/x] [bold] :smile:" in result.err


def test_cite_and_source(run: Run, tmp_path: Path, model_folder: Path, says: Says) -> None:
    two = tmp_path / "two.pdf"
    pages = (
        lines(b"The first page has a red box."),
        lines(b"The second page has", b"a blue box."),
        lines(b"An end."),
    )
    two.write_bytes(pdf(*pages, labels=b"[0 << /S /r >>]"))
    says("> The second page has a blue box.\n> The third page has a green box.\n99")
    commands = ("/cite", "Which box?", "/cite", "/source 1", "/source 3", "/source 4", "/source", "/cite 1")
    result = run("chat", two, "-m", model_folder, stdin="\n".join(commands))
    assert result.code == 0
    assert "there is no answer yet" in result.err
    assert "1 verified, p. ii (PDF page 2): The second page has a blue box." in result.err
    assert "2 not in the document: The third page has a green box. · nearest, p. i (PDF page 1)" in result.err
    assert "p. ii (PDF page 2)\n\nThe second page has\na blue box.\n" in result.out
    assert "The first page has" not in result.out[result.out.index("p. ii (PDF page 2)\n\n") :]
    assert "nor is anything like it" in result.err
    assert result.err.count("/source takes a number from 1 to 3") == 2
    assert "/cite takes nothing after it" in result.err
    goes_on = run("chat", "-c", "-m", model_folder, stdin="/cite\n")
    assert "p. ii (PDF page 2)" in goes_on.out
    says("The document does not say.")
    assert "no quote, number or name" in run("chat", two, "-m", model_folder, stdin="Why?\n/cite\n").err


def test_source_shows_lines_around(run: Run, tmp_path: Path, model_folder: Path, says: Says) -> None:
    file = tmp_path / "long.txt"
    file.write_text("".join(f"Line {i} has words{' and words' * 20 * (i == 45)}\n" for i in range(30, 60)))
    says("> Line 45 has words")
    out = run("chat", file, "-m", model_folder, stdin="Which?\n/source 1\n").out
    shown = out[out.index("long.txt:16") :].splitlines()
    assert [line.split()[1] for line in shown[2:]] == [str(i) for i in range(39, 52)]


def test_quotes_are_found_when_the_file_has_gone(
    run: Run, book: Path, model_folder: Path, says: Says
) -> None:
    says("> The code of the red box is 7731.")
    run("chat", book, "-m", model_folder, stdin="Which?\n")
    book.unlink()
    result = run("chat", "-c", "-m", model_folder, stdin="/cite\n/source 1\n")
    assert "book.txt:1 (the first of 20)" in result.out


# --- stored caches ------------------------------------------------------------------------------------------


def test_the_second_question_reads_the_cache(run: Run, book: Path, model_folder: Path) -> None:
    arguments = ("ask", book, "Which code?", "-m", model_folder, "--max-tokens", 8)
    first, second = run(*arguments), run(*arguments)
    assert "tokens prefilled in" in first.err
    assert "tokens read from cache in" in second.err
    assert second.out == first.out
    assert "prefilled" in run(*arguments, "--no-cache").err
    assert "prefilled" in run(*arguments, "--refresh").err
    assert json.loads(run(*arguments, "--json").out)["statistics"]["cached_tokens"] == 828
    command = [sys.executable, "-m", "kvchat", *map(str, arguments)]
    third = subprocess.run(command, capture_output=True, text=True, check=True)
    assert third.stdout == first.out
    assert "tokens read from cache in" in third.stderr


def test_ingest_stores_what_ask_reads(run: Run, book: Path, model_folder: Path) -> None:
    stored = json.loads(run("ingest", book, "-m", model_folder, "--json").out)
    assert stored["cache"]
    assert "828 tokens prefilled" not in run("ask", book, "why?", "-m", model_folder, "--max-tokens", 1).err
    again = run("ingest", book, "-m", model_folder)
    assert "828 tokens read from cache" in again.err
    small = run("ingest", book, "-m", model_folder, "--refresh", "--max-size", "100")
    assert small.code == 1
    assert "not kept on disk" in small.err


def test_caches_are_listed_shown_and_removed(run: Run, book: Path, model_folder: Path) -> None:
    assert "no stored caches" in run("cache", "list").err
    for spec in ("kivi2", "kivi4"):
        run("ingest", book, "-m", model_folder, "--kv", spec)
    table = run("cache", "list").out
    assert "book.txt" in table and "kivi2" in table and "kivi4" in table and "828" in table
    listed = json.loads(run("cache", "list", "--json").out)
    assert [c["format"] for c in listed] == ["kivi4", "kivi2"]
    one = listed[0]["id"]
    shown = run("cache", "show", one[:8]).out
    assert "every byte is as it was written" in shown
    assert "depends on: weights" in shown
    segment = next((places.caches() / one).glob("*.safetensors"))
    segment.write_bytes(segment.read_bytes()[:-1])
    shown = run("cache", "show", one[:8])
    assert shown.code == 1
    assert "it cannot be used" in shown.err
    (places.caches() / one / "manifest.json").write_text("{}")
    assert "manifest is damaged" in run("cache", "list").out
    assert "removed 1" in run("cache", "prune").err
    assert "removed 1 cache," in run("cache", "prune", "--max-size", "1k").err
    assert "no stored caches" in run("cache", "list").err
    run("ingest", book, "-m", model_folder)
    assert "removed 0" in run("cache", "prune", "--older-than", "1").err
    assert "removed 1 of 1" in run("cache", "rm", "--all").err
    assert run("cache", "rm", "--all", "x").code == 2


def test_add_reads_anew_and_failing_changes_nothing(
    run: Run, book: Path, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "second.txt").write_text("A second text.")
    (tmp_path / "long.txt").write_text("x" * 3000)
    lines = [
        f"/add {tmp_path / 'long.txt'}",
        f"/add {tmp_path / 'nosuch.txt'}",
        f"/add {tmp_path / 'second.txt'}",
        "/files",
    ]
    result = run("chat", book, "-m", model_folder, stdin="\n".join(lines))
    assert "reads 2,048" in result.err
    assert "no such file" in result.err
    assert "second.txt" in result.out
    assert "long.txt" not in result.out


def test_ingest_counts(run: Run, book: Path, model_folder: Path) -> None:
    folder = book.parent / "folder"
    folder.mkdir()
    book = book.rename(folder / "book.txt")
    (folder / "blob.bin").write_bytes(b"\0\1\2")
    plan = json.loads(run("ingest", "--dry-run", folder, "-m", model_folder, "--json").out)
    assert {"name": "book.txt", "tokens": len(book.read_text()), "notes": []} in plan["files"]
    assert {"name": "blob.bin", "reason": "binary"} in plan["skipped"]
    answered = json.loads(
        run("ask", book.parent, "why?", "-m", model_folder, "--json", "--max-tokens", 1).out
    )
    assert plan["tokens"] == answered["statistics"]["document_tokens"]
    table = run("ingest", "--dry-run", folder, "-m", model_folder)
    assert "blob.bin" in table.err
    assert "fits the 2,048" in table.out
    assert "0.6x less" not in table.out
    assert "x more" in table.out  # nothing is packed yet, and the window is float32


@pytest.mark.parametrize("spare", [0, -1])
def test_the_plan_and_the_question_agree_on_what_fits(
    run: Run, tmp_path: Path, model_folder: Path, spare: int
) -> None:
    """A dry run that says `fits` is a promise; one token more must not."""
    file = tmp_path / "long.txt"
    file.write_text("x")
    around = json.loads(run("ingest", "--dry-run", file, "-m", model_folder, "--json").out)["tokens"] - 1
    file.write_text("x" * (2048 - 64 - around - spare))
    plan = json.loads(run("ingest", "--dry-run", file, "-m", model_folder, "--json").out)
    ingested = run("ingest", file, "-m", model_folder)
    assert plan["fits"] == (spare == 0)
    assert ingested.code == (0 if plan["fits"] else 4)


def test_compare_memory_needs_the_configuration_alone(run: Run, model_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text((model_folder / "config.json").read_text())
    comparison = json.loads(run("compare-memory", "--tokens", 100_000, "-m", tmp_path, "--json").out)
    assert [row["now"]["format_name"] for row in comparison["rows"]] == list(PRESETS)
    in_use = [row["now"]["in_use"] for row in comparison["rows"]]
    assert in_use[0] == max(in_use) and in_use[-1] == min(in_use)
    assert (
        comparison["rows"][0]["now"]["fp16"] == 100_000 * 4 * 2 * 16 * 2 * 2
    )  # layers, heads, head_dim, K and V, bytes
    config.write_text('{"model_type": "mamba"}')
    refused = run("compare-memory", "--tokens", 5, "-m", tmp_path)
    assert refused.code == 1
    assert "mamba" in refused.err


def test_the_default_can_be_planned_for_before_it_is_pulled(run: Run, book: Path) -> None:
    comparison = json.loads(run("compare-memory", "--tokens", 16_384, "--json").out)
    assert (comparison["model"], comparison["context"], comparison["weights"]) == (
        "smollm2-recall",
        16_384,
        0,
    )
    assert comparison["rows"][0]["now"]["fp16"] == 16_384 * 30 * 2 * 3 * 64 * 2
    assert "not on this machine" in run("models", "info").out
    assert run("compare-memory", book).code == 5  # nothing to count its tokens with


def test_plot_is_a_picture(run: Run, model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    assert run("compare-memory", "--tokens", 5000, "-m", model_folder, "--plot", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_measure_compares_with_the_unquantized_run(run: Run, book: Path, model_folder: Path) -> None:
    result = run("compare-memory", book, "-m", model_folder, "--measure", "--kv", "kivi2", "--json")
    reference, packed = json.loads(result.out)["measured"]
    assert reference["format_name"] == "fp16"
    assert reference["agreement"] == 1
    assert reference["same_tokens"] == reference["answer_tokens"]
    assert packed["format_name"] == "kivi2"
    assert packed["agreement"] < 1  # at these weights two bits cannot go unnoticed
    assert packed["in_use"] < reference["in_use"]
    assert min(packed["peak"], packed["read_speed"], packed["decode_speed"]) > 0


def test_config_file_gives_defaults_and_flags_win(run: Run, book: Path, model_folder: Path) -> None:
    places.config_file().parent.mkdir(parents=True)
    places.config_file().write_text(f'model = "{model_folder}"\nkv = "kivi3"\nmax-tokens = 2\n')
    assert "kivi3 4.5 bits" in run("ask", book, "why?").err
    assert "kivi2 3.5 bits" in run("ask", book, "why?", "--kv", "kivi2").err
    places.config_file().write_text("nosuch = 1\n")
    result = run("ask", book, "why?")
    assert result.code == 2
    assert "nosuch" in result.err


def test_the_config_file_is_blamed_for_what_it_says(run: Run, book: Path, model_folder: Path) -> None:
    places.config_file().parent.mkdir(parents=True)
    for content, words in (
        ('max-tokens = "abc"', "sets max-tokens to 'abc'"),
        ("max-tokens = 2\nmax_tokens = 3", "sets max-tokens twice"),
        ("temp = -1", "sets temp to -1"),
        ("= nonsense", "cannot be read"),
    ):
        places.config_file().write_text(content)
        result = run("ask", book, "why?", "-m", model_folder)
        assert result.code == 2
        assert str(places.config_file()) in result.err
        assert words in result.err
        doctor = run("doctor")  # the command that names the file must not depend on it
        assert doctor.code == 0
        assert words in doctor.err
    places.config_file().write_text(
        f'model = "{model_folder}"\nkv = "kivi2"\ninclude = "*.txt"\njson = true\n'
    )
    comparison = json.loads(run("compare-memory", "--tokens", 1000).out)
    assert len(comparison["rows"]) == len(PRESETS)
    assert json.loads(run("ingest", "--dry-run", book.parent).out)["usages"][0]["format_name"] == "kivi2"


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_closed_streams_end_in_no_traceback(book: Path, stream: str) -> None:
    command = f'"{sys.executable}" -m kvchat compare-memory --tokens 1000 {stream}'
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert ("kivi2" in result.stdout) == (stream != ">&-")


def test_a_full_device_is_named(book: Path) -> None:
    command = f'"{sys.executable}" -m kvchat compare-memory --tokens 1000 > /dev/full'
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the output: No space left" in result.stderr


def test_environment_beats_the_config_file(
    run: Run, book: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.config_file().parent.mkdir(parents=True)
    places.config_file().write_text('kv = "kivi3"\n')
    monkeypatch.setenv("KVCHAT_KV", "kivi2")
    monkeypatch.setenv("KVCHAT_MODEL", str(model_folder))
    assert "kivi2 3.5 bits" in run("ask", book, "why?", "--max-tokens", 2).err


def test_doctor_and_models(run: Run, model_folder: Path) -> None:
    assert "torch" in run("doctor").out
    assert "no models yet" in run("models", "list").err
    assert "2 key-value, head_dim 16" in run("models", "info", model_folder).out


@pytest.mark.parametrize(
    "command", ["", "ask", "chat", "ingest", "compare-memory", "models", "models pull", "doctor"]
)
def test_help_imports_nothing_heavy(command: str) -> None:
    """The half second that `--help` may take is spent by imports: so it is they that are counted."""
    code = (
        "import sys; from kvchat.cli import main; sys.argv = ['kvchat', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'pypdf', 'prompt_toolkit'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_calibrate_is_for_the_formats_that_need_it(
    run: Run, book: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    short = run("calibrate", folder, book, "--pieces", 2, "--tokens", 1024)
    assert short.code == 3
    assert "the text has 660 tokens" in short.err
    assert not (folder / NAME).exists()
    measured = run("compare-memory", "--measure", "--kv", "kvquant2", book, "-m", folder)
    assert "not measured: kvquant2; they need a calibration" in measured.err
    monkeypatch.setattr(calibrations, "builtin_text", lambda: "It is 7 o'clock, and all is well. " * 200)
    monkeypatch.setattr(calibrations, "PIECES", 1)
    long = run("calibrate", folder, book, "--tokens", 100_000)
    assert long.code == 2
    assert "more than model takes" in long.err
    with monkeypatch.context() as patch:  # before anything is computed
        patch.setattr("kvchat.kv.calibration.NAME", "missing/calibration")
        patch.setattr("kvchat.kv.calibrate.calibrate", lambda *_: pytest.fail("it computes"))
        closed = run("calibrate", folder, book, "--pieces", 1, "--tokens", 64)
    assert closed.code == 1
    assert "make the folder writable" in closed.err
    made = run("ask", book, "why?", "-m", folder, "--kv", "kvquant3", "--max-tokens", 2, "--no-cache")
    assert made.code == 0
    assert "kvquant3 needs a calibration of model; making one from a built-in text" in made.err
    first = (folder / NAME).read_bytes()
    again = run("ask", book, "why?", "-m", folder, "--kv", "kvquant3", "--max-tokens", 2)
    assert "calibration" not in again.err
    result = run("calibrate", folder, book, "--pieces", 2, "--tokens", 128)
    assert (result.code, result.out) == (0, "")
    assert "model is calibrated on book.txt" in result.err
    assert "256 tokens are few" in result.err
    assert (folder / NAME).read_bytes() != first
    other = run("ask", book, "why?", "-m", folder, "--kv", "kvquant3", "--max-tokens", 2)
    assert "another calibration" in other.err
    (folder / NAME).write_bytes(first[:99])
    broken = run("ask", book, "why?", "-m", folder, "--kv", "kvquant3")
    assert broken.code == 1
    assert "remove it, and another" in broken.err


def test_a_conversation_keeps_the_options_of_its_documents(
    run: Run, tmp_path: Path, model_folder: Path
) -> None:
    two = tmp_path / "two.pdf"
    two.write_bytes(pdf(lines(b"The first page has a red box."), lines(b"The second page has a blue box.")))
    model = ("-m", model_folder, "--max-tokens", 2)
    run("chat", two, "--pages", 1, *model, stdin="Which box?\n")
    for words in ([], [two]):
        goes_on = run("chat", "-c", *words, *model, stdin="/files\n")
        assert goes_on.code == 0
        assert "going on after 1 turns" in goes_on.err
        assert "read from cache" in goes_on.err
        assert "prefilled" not in goes_on.err
    differs = run("chat", "-c", "--pages", "1-2", *model)
    assert differs.code == 2
    assert "read with pages 1, and not 1-2; leave that out, or leave out -c" in differs.err
    assert run("chat", "-c", "--pages", "1", *model, stdin="").code == 0


def test_what_is_not_kept_is_said_also_quietly_and_in_json(run: Run, book: Path, model_folder: Path) -> None:
    quiet = run("ingest", "-q", "--max-size", 10, book, "-m", model_folder)
    assert quiet.code == 1
    assert "--max-size is 10 B" in quiet.err
    assert "could not be kept" in quiet.err
    asked = run("ask", "--json", "--max-size", 10, book, "why?", "-m", model_folder, "--max-tokens", 2)
    assert any("--max-size is 10 B" in note for note in json.loads(asked.out)["notes"])


def test_a_store_that_cannot_be_looked_into_is_said(run: Run) -> None:
    places.caches().parent.mkdir(parents=True, exist_ok=True)
    places.caches().write_text("a file")
    listed = run("cache", "list")
    assert listed.code == 1
    assert "Not a directory" in listed.err
    assert str(places.caches()) in listed.err


def test_prune_says_what_is_in_use(run: Run, book: Path, model_folder: Path) -> None:
    run("ingest", book, "-m", model_folder)
    [one] = json.loads(run("cache", "list", "--json").out)
    with Store(places.caches(), 0).lock(one["id"]):
        result = run("cache", "prune", "--max-size", 0)
    assert result.code == 1
    assert "another kvchat uses" in result.err
    assert run("cache", "prune", "--max-size", 0).code == 0
