"""Folders: what is read, in which order, and what is skipped and why."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdfs import IMAGE, lines, pdf

from kvchat.documents import Options, Reading, Step, read, read_now
from kvchat.errors import InputError, UsageError

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(params=["plain", pytest.param("git", marks=needs_git)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder, within and without a git work tree: both must behave alike."""
    if request.param == "git":
        git(tmp_path, "init", "-q")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def put(folder: Path, *names: str, text: str = "text\n") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(reading: Reading) -> list[str]:
    return [document.name for document in reading.documents]


def skipped(reading: Reading) -> dict[str, str]:
    return {entry.name: entry.reason for entry in reading.skipped}


def test_files_are_sorted_by_path_and_named_within_the_folder(folder: Path) -> None:
    put(folder, "b.py", "a/z.py", "a/b/c.py", "A.md", "a-b.txt")
    expected = ["A.md", "a-b.txt", "a/b/c.py", "a/z.py", "b.py"]
    assert names(read_now([folder])) == expected
    assert names(read_now([str(folder) + "/"])) == expected


def test_each_skipped_file_has_its_reason(folder: Path) -> None:
    put(folder, "ok.txt", ".dot", ".github/a.yml", ".github/b.yml", "package-lock.json", "a.min.js")
    put(folder, "prod.env", "secrets.yaml", "credentials.json")
    put(folder, "Cargo.lock", "key.PEM", ".env", "id_rsa", "pic.png", "large.txt", text="x" * 99)
    put(folder, "blank.md", text=" \n")
    (folder / "nul.dat").write_bytes(b"a\0b")
    (folder / "large.txt").write_text("x" * 2_340_000)
    reading = read_now([folder], Options(max_file_size=2_000_000))
    assert names(reading) == ["ok.txt"]
    assert skipped(reading) == {
        ".dot": "hidden",
        ".env": "looks like a secret",
        ".github/": "hidden",
        "Cargo.lock": "lock file/generated",
        "a.min.js": "lock file/generated",
        "blank.md": "empty",
        "credentials.json": "looks like a secret",
        "id_rsa": "looks like a secret",
        "key.PEM": "looks like a secret",
        "large.txt": "too large (2.3 MB)",
        "nul.dat": "binary",
        "package-lock.json": "lock file/generated",
        "pic.png": "binary",
        "prod.env": "looks like a secret",
        "secrets.yaml": "looks like a secret",
    }


def test_hidden_files_can_be_asked_for_but_never_secrets_or_git(folder: Path) -> None:
    put(folder, "ok.txt", ".dot", ".github/a.yml", ".env.local", ".env/a.txt")
    (folder / ".git").mkdir(exist_ok=True)
    put(folder / ".git", "notes.txt")
    reading = read_now([folder], Options(hidden=True))
    assert names(reading) == [".dot", ".env/a.txt", ".github/a.yml", "ok.txt"]
    assert skipped(reading) == {".env.local": "looks like a secret"}


def test_named_files_escape_the_rules(tmp_path: Path) -> None:
    put(tmp_path, ".env", "yarn.lock")
    options = Options(include=("*.py",), exclude=("*",))
    assert names(read_now([tmp_path / ".env", tmp_path / "yarn.lock"], options)) == [
        ".env",
        "yarn.lock",
    ]


def test_include_and_exclude(folder: Path) -> None:
    put(folder, "a.py", "a.md", "src/b.py", "src/b_test.py", "vendor/c.py", "vendor/deep/d.py")
    reading = read_now([folder], Options(include=("*.py",), exclude=("*_test.py", "vendor/")))
    assert names(reading) == ["a.py", "src/b.py"]
    assert skipped(reading) == {
        "a.md": "not in --include",
        "src/b_test.py": "excluded",
        "vendor/": "excluded",
    }


@pytest.mark.parametrize(
    "options",
    [Options(include=("!",)), Options(exclude=("[z-a]",)), Options(include=("[",)), Options(exclude=("a[",))],
)
def test_a_pattern_that_is_none_is_a_usage_error(tmp_path: Path, options: Options) -> None:
    put(tmp_path, "a.py")
    with pytest.raises(UsageError, match="is no pattern"):
        read_now([tmp_path], options)


def test_nested_gitignore_files_are_followed_in_silence(folder: Path) -> None:
    put(folder, "a.txt", "a.log", "build/x.txt", "sub/a.log", "sub/keep.log", "sub/only.txt")
    put(folder, "sub/deep/only.txt", "sub/deep/b.txt")
    put(folder, ".gitignore", text="*.log\n/build/\n\\\n[z-a]\n")
    put(folder, "sub/.gitignore", text="!keep.log\n/only.txt\n")
    reading = read_now([folder])
    assert names(reading) == ["a.txt", "sub/deep/b.txt", "sub/deep/only.txt", "sub/keep.log"]
    assert skipped(reading) == {".gitignore": "hidden", "sub/.gitignore": "hidden"}
    assert "build/x.txt" in names(read_now([folder], Options(gitignore=False)))


@needs_git
def test_git_knows_more_than_gitignore_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    put(tmp_path, "src/tracked.log", "src/untracked.txt", "src/private.txt", "src/gone.txt")
    git(tmp_path, "add", "src/tracked.log", "src/gone.txt")
    put(tmp_path, ".gitignore", text="*.log\n")
    put(tmp_path, ".git/info/exclude", text="private.txt\n")
    (tmp_path / "src/gone.txt").unlink()
    # Asked from a folder below, the rules above it hold too.
    assert names(read_now([tmp_path / "src"])) == ["tracked.log", "untracked.txt"]


@needs_git
def test_an_ignored_folder_that_is_named_is_read(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    put(tmp_path, ".gitignore", text="build/\n")
    put(tmp_path, "build/a.txt")
    assert names(read_now([tmp_path / "build"])) == ["a.txt"]


@needs_git
def test_repositories_within_are_read_by_their_own_rules(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    put(tmp_path, "a.txt", "inner/b.txt", "inner/c.log", "inner/sub/d.txt")
    put(tmp_path, "inner/.gitignore", text="*.log\n")
    git(tmp_path / "inner", "init", "-q")
    assert names(read_now([tmp_path])) == ["a.txt", "inner/b.txt", "inner/sub/d.txt"]


@needs_git
def test_a_folder_that_is_read_runs_no_program(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    put(tmp_path, "a.txt")
    put(tmp_path, "hook", text="#!/bin/sh\ntouch ran\n")
    (tmp_path / "hook").chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(tmp_path / "hook"))
    read_now([tmp_path])
    assert not (tmp_path / "ran").exists()


def test_without_git_the_folder_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.txt", "b.log", ".git/c.txt")
    put(tmp_path, ".gitignore", text="*.log\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names(read_now([tmp_path])) == ["a.txt"]


def test_symbolic_links_are_skipped_and_never_loop(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    put(outside, "secret.txt")
    put(folder, "a.txt", "sub/b.txt")
    (folder / "sub/loop").symlink_to(folder)
    (folder / "self").symlink_to("self")
    (folder / "file").symlink_to(outside / "secret.txt")
    (folder / "dir").symlink_to(outside)
    (folder / "inside").symlink_to("a.txt")
    reading = read_now([folder])
    assert names(reading) == ["a.txt", "sub/b.txt"]
    assert skipped(reading) == {
        "dir": "symlink that leaves the folder",
        "file": "symlink that leaves the folder",
        "inside": "symlink within the folder",
        "self": "broken symlink",
        "sub/loop": "symlink within the folder",
    }


def test_a_folder_that_is_a_link_is_read(tmp_path: Path) -> None:
    put(tmp_path, "real/a.txt")
    (tmp_path / "link").symlink_to("real")
    assert names(read_now([tmp_path / "link"])) == ["a.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_fifos_are_skipped(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert skipped(read_now([tmp_path])) == {"pipe.txt": "not a regular file"}


def test_what_cannot_be_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # chmod does not stop root, who runs these tests in a container.
    put(tmp_path, "a.txt", "locked.txt", "sub/b.txt")
    read_bytes, scandir = Path.read_bytes, os.scandir

    def read_most(self: Path) -> bytes:
        if self.name == "locked.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(self)

    def scan_most(path: Path) -> Iterator[os.DirEntry[str]]:
        if path.name == "sub":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(Path, "read_bytes", read_most)
    monkeypatch.setattr(os, "scandir", scan_most)
    reading = read_now([tmp_path])
    assert names(reading) == ["a.txt"]
    reason = "cannot be read: Permission denied"
    assert skipped(reading) == {"locked.txt": reason, "sub/": reason}


def test_a_link_whose_target_cannot_be_examined_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "a.txt", "dir/x")
    (folder / "link").symlink_to("dir/x")
    exists = Path.exists

    def locked(self: Path, **settings: bool) -> bool:
        if self.name == "link":
            raise PermissionError(13, "Permission denied")
        return exists(self, **settings)

    monkeypatch.setattr(Path, "exists", locked)
    reading = read_now([folder])
    assert names(reading) == ["a.txt", "dir/x"]
    assert skipped(reading) == {"link": "cannot be read: Permission denied"}


def test_an_unreadable_gitignore_ignores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.txt", ".gitignore")
    read_bytes = Path.read_bytes

    def locked(self: Path) -> bytes:
        if self.name == ".gitignore":
            raise PermissionError(13, "Permission denied")
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", locked)
    assert names(read_now([tmp_path])) == ["a.txt"]


def test_an_empty_path_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="a path is empty"):
        read_now(["a.txt", ""])


def test_the_home_folder_is_expanded_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "home", "a.txt", text="at home")
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert read_now(["~/a.txt"]).documents[0].text == "at home"
    put(tmp_path / "here" / "~", "a.txt", text="here")
    assert read_now(["~/a.txt"]).documents[0].text == "here"


def test_a_path_with_its_quotes_is_told_to_leave_them_out() -> None:
    with pytest.raises(InputError, match="leave out the quotes"):
        read_now(["'my book.pdf'"])


def test_what_is_also_named_is_not_said_to_be_skipped(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", ".hidden")
    reading = read_now([tmp_path / ".hidden", tmp_path])
    assert sorted(names(reading)) == [".hidden", "a.txt"]
    assert skipped(reading) == {}


def test_small_sizes_are_shown_as_they_are(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", "b.txt", text="x" * 43)
    (tmp_path / "a.txt").write_text("x")
    assert skipped(read_now([tmp_path], Options(max_file_size=10))) == {"b.txt": "too large (43 bytes)"}


def test_names_that_are_not_utf8_are_read_and_shown_safely(folder: Path) -> None:
    for name in (b"caf\xe9.txt", b"caf\xe8.txt", b"caf\xe9.png"):
        (folder / os.fsdecode(name)).write_text("x")
    reading = read_now([folder])
    assert names(reading) == ["caf\ufffd.txt", "caf\ufffd.txt (2)"]
    assert skipped(reading) == {"caf\ufffd.png": "binary"}


def test_pdfs_are_read_and_one_that_fails_is_skipped(folder: Path) -> None:
    (folder / "a.pdf").write_bytes(pdf(lines(b"hello")))
    (folder / "b.PDF").write_bytes(pdf(IMAGE, IMAGE))
    (folder / "c.pdf").write_bytes(b"not at all")
    (folder / "d.pdf").touch()
    put(folder, "e.txt")
    reading = read_now([folder])
    assert names(reading) == ["a.pdf", "e.txt"]
    reasons = skipped(reading)
    assert reasons["b.PDF"] == "no text layer (2 pages)"
    assert reasons["c.pdf"].startswith("a damaged PDF")
    assert reasons["d.pdf"] == "empty"


def test_a_folder_with_nothing_readable_is_refused_with_reasons(folder: Path) -> None:
    put(folder, "a.png", "b.png", ".dot", "sub/c.txt", text="")
    with pytest.raises(InputError) as error:
        read_now([folder])
    message = str(error.value)
    assert message.startswith(f"nothing readable in {folder} (2 binary, 1 hidden, 1 empty); ")
    assert error.value.exit_code == 3


def test_an_empty_folder_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="it is empty, or git ignores what it holds"):
        read_now([folder])


def test_a_file_in_several_arguments_is_read_once_where_it_came_first(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", "b.txt", "sub/c.txt")
    paths = [tmp_path / "b.txt", tmp_path, tmp_path / "sub", tmp_path]
    assert names(read_now(paths)) == ["b.txt", "a.txt", "sub/c.txt"]


def test_a_file_that_is_also_named_may_not_fail(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    (tmp_path / "scan.pdf").write_bytes(pdf(IMAGE))
    with pytest.raises(InputError, match=r"^scan\.pdf has no text layer"):
        read_now([tmp_path, tmp_path / "scan.pdf"])


def test_names_of_two_folders_differ(tmp_path: Path) -> None:
    put(tmp_path, "v1/src/a.py", "v2/src/a.py", "v2/src/b.py")
    reading = read_now([tmp_path / "v1/src", tmp_path / "v2/src"])
    assert names(reading) == ["v1/src/a.py", "v2/src/a.py", "b.py"]


def test_steps_count_files_and_the_pages_of_pdfs(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    (tmp_path / "b.pdf").write_bytes(pdf(lines(b"x")))
    assert list(read([tmp_path])) == [
        Step("a.txt", 1, 2, "files"),
        Step("b.pdf", 1, 1, "pages"),
        Step("b.pdf", 2, 2, "files"),
    ]
