"""The words after `kvchat ask`: which are paths, and which is the question."""

from __future__ import annotations

import sys

from kvchat import steps
from kvchat.errors import InputError, UsageError


def split_arguments(arguments: list[str], files: list[str]) -> tuple[list[str], str | None]:
    """Paths and the question, which comes last and is no path. Raises InputError for a path that isn't there."""
    paths, question = [*files, *arguments], None
    if arguments and arguments[-1] != "-" and not steps.exists(arguments[-1]):
        question = paths.pop()
        if not question.strip():
            raise UsageError("the question is empty; put it last, in quotes")
        if steps.looks_like_path(question) or not paths:
            raise InputError(
                f"no such file or folder: {question}; check the path, and put a question last, in quotes"
            )
    if not paths:
        raise UsageError('there is nothing to read; use: kvchat ask PATH... "QUESTION"')
    return paths, question


def question_from_stdin(paths: list[str]) -> str:
    if sys.stdin.isatty() or "-" in paths:
        raise UsageError('there is no question; put it last, in quotes: kvchat ask PATH "QUESTION"')
    question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question:
        raise UsageError("the question read from stdin is empty; put it last, in quotes")
    return question
