"""Count tokens with a model's tokenizer file alone: no transformers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvchat.errors import DoesNotFit, ModelNotFound
from kvchat.prompt import text_tokenizer

ANSWER_ROOM = 64
"""Tokens that must be left for an answer before a document or a question is taken at all."""


def check_context(name: str, tokens: int, context: int) -> None:
    """Raises DoesNotFit, with both numbers, for a document that leaves no room for an answer."""
    if tokens + ANSWER_ROOM > context:
        raise DoesNotFit(
            f"the document needs {tokens:,} tokens and {name} reads {context:,} ({ANSWER_ROOM} are kept for an answer); "
            "give fewer files, --pages, or a model with a longer context"
        )


def count_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, as the prompt would encode it. Raises ModelNotFound where there is no tokenizer.json."""
    file = (folder if folder.is_dir() else folder.parent) / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFound(
            f"{file.parent} has no tokenizer.json to count with; pull the model, or use --tokens N"
        )
    tokenizer = text_tokenizer(file.read_text("utf-8"))
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
