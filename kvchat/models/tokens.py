"""Count the tokens of documents exactly as a session will, with a model's tokenizer files alone: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvchat.documents import Document
from kvchat.errors import DoesNotFit
from kvchat.models.tokenizer import FolderTokenizer
from kvchat.prompt import Prompt

ANSWER_ROOM = 64
"""Tokens that must be left for an answer before a document or a question is taken at all."""


def check_context(name: str, tokens: int, context: int) -> None:
    """Raises DoesNotFit, with both numbers, for a document that leaves no room for an answer."""
    if tokens + ANSWER_ROOM > context:
        raise DoesNotFit(
            f"the document needs {tokens:,} tokens and {name} reads {context:,} ({ANSWER_ROOM} are kept for an answer); "
            "give fewer files, --pages, or a model with a longer context"
        )


def count_tokens(
    tokenizer: FolderTokenizer, documents: Sequence[Document], system: str | None = None
) -> tuple[list[int], int]:
    """Tokens of each document's text, and of the whole prompt that a question follows."""
    prompt = Prompt(tokenizer, system)
    counts = [len(prompt.text_ids(document.text)) for document in documents]
    return counts, len(prompt.prefix_ids([(d.name, d.text) for d in documents]))
