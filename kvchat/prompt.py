"""The prompt as token ids: the chat template, split around the document, and document text that can never forge a turn.

A conversation is `head DOCUMENTS bridge QUESTION tail ANSWER next QUESTION tail ANSWER ...`. The pieces in small letters come
out of the model's own chat template and are encoded with its special tokens. Documents, their names and questions are
encoded by a second tokenizer that has none: `<|im_end|>` in a book is nine characters, not the end of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from kvchat.errors import KVChatError, UsageError

SYSTEM = "Answer from the document. First quote the passage word for word, then give the answer."
SYSTEM_WITHOUT_DOCUMENT = "You are a helpful AI assistant."
READY = "Ready."

_DOCUMENT, _FIRST, _ANSWER, _SECOND = (f"kvchat-{n}-placeholder" for n in ("doc", "one", "two", "three"))

Render = Callable[[list[dict[str, str]]], str]
"""Messages to the text of the chat template, open for the assistant's answer. Raises whatever the template raises."""


@dataclass(frozen=True)
class Frame:
    """The template's text around documents, questions and answers, and what a user should know about it."""

    head: str
    bridge: str
    tail: str
    next: str
    notes: tuple[str, ...] = ()


def frame(render: Render | None, system: str, with_document: bool) -> Frame:
    """Split a chat template. `None`, or a template that cannot hold a conversation, ends in a plain text frame."""
    if render is None:
        note = "this model has no chat template, so it gets plain text (Document, Question, Answer)"
        return _plain(system, with_document, note)
    opening: list[dict[str, str]] = []
    if with_document:
        opening = [{"role": "user", "content": _DOCUMENT}, {"role": "assistant", "content": READY}]
    turns = [
        *opening,
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    folded = [{**turns[0], "content": f"{system}\n\n{turns[0]['content']}"}, *turns[1:]]
    attempts = [
        ([{"role": "system", "content": system}, *turns], ()),
        (folded, ("this model's chat template has no system role, so the instruction opens the first turn",)),
    ]
    for messages, notes in attempts:
        try:
            text = render(messages)
        except Exception:  # a template is a program of the model's: it may raise anything
            continue
        pieces = _split(text, [_DOCUMENT, _FIRST, _ANSWER, _SECOND][0 if with_document else 1 :])
        if pieces and system in text:
            head, bridge = (pieces[0], pieces[1]) if with_document else ("", pieces[0])
            return Frame(head, bridge, pieces[-3], pieces[-2], notes)
    return _plain(
        system, with_document, "this model's chat template cannot hold a conversation, so it gets plain text"
    )


def _split(text: str, marks: list[str]) -> list[str] | None:
    """The text around marks that stand in it once each, in order; None if they don't."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        pieces.append(before)
    return [*pieces, text]


def _plain(system: str, with_document: bool, note: str) -> Frame:
    head = f"{system}\n\nDocument:\n" if with_document else ""
    bridge = "\n\nQuestion: " if with_document else f"{system}\n\nQuestion: "
    return Frame(head, bridge, "\nAnswer:", "\n\nQuestion: ", (note,))


def text_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without its added tokens, so that nothing in a text can become one of them.

    Added tokens of white space alone stay: they forge nothing, and a model expects them (runs of newlines).
    """
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    plain.add_tokens([added[i] for i in sorted(added) if not added[i].content.strip()])
    return plain


class Prompt:
    """Encodes documents, questions and what lies between them. `tokenizer` is transformers' fast tokenizer."""

    def __init__(self, tokenizer: Any, system: str | None = None, with_document: bool = True):
        backend: Tokenizer = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if system is None:
            system = SYSTEM if with_document else SYSTEM_WITHOUT_DOCUMENT
        _check_characters(system)
        self.system = system
        render = None
        if tokenizer.chat_template:

            def render(messages: list[dict[str, str]]) -> str:
                return tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
                )

        self.frame = frame(render, system, with_document)
        self.with_document = with_document
        self._scaffold = backend
        self._text = text_tokenizer(backend)
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._added = frozenset(i for i, content in added.items() if content.strip())
        # where other added tokens are gone, those of white space may have moved up
        self._moved = {
            self._text.token_to_id(content): i
            for i, content in added.items()
            if not content.strip() and self._text.token_to_id(content) != i
        }
        self._opening = [] if tokenizer.chat_template else backend.encode("").ids  # a base model's BOS

    def prefix_ids(self, documents: Sequence[tuple[str, str]]) -> list[int]:
        """Everything before the first question: (name, text) of each document, in order."""
        ids = self._opening + self._scaffold_ids(self.frame.head)
        for i, (name, text) in enumerate(documents):
            close = "\n</document>\n" if i else ""
            name = name.replace('"', "'")
            ids += self.text_ids(f'{close}<document name="{name}">\n') + self.text_ids(text)
        if documents:
            ids += self.text_ids("\n</document>")
        return ids + self._scaffold_ids(self.frame.bridge)

    def question_ids(self, question: str) -> list[int]:
        """A question and the opening of the answer to it."""
        return self.text_ids(question) + self._scaffold_ids(self.frame.tail)

    def next_ids(self) -> list[int]:
        """What closes an answer and opens the next question."""
        return self._scaffold_ids(self.frame.next)

    def text_ids(self, text: str) -> list[int]:
        """Text that is nobody's but the document's or the user's.

        Raises KVChatError rather than emit an added token, UsageError for lone surrogates: bytes that were no UTF-8.
        """
        _check_characters(text)
        ids = self._text.encode(text, add_special_tokens=False).ids
        if self._moved:
            ids = [self._moved.get(i, i) for i in ids]
        if not self._added.isdisjoint(ids):
            token = self._scaffold.id_to_token(next(i for i in ids if i in self._added))
            raise KVChatError(f"this tokenizer turns text into its control token {token}; take another model")
        return ids

    def stop_ids(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """The model's stop ids and the token by which its template ends a turn."""
        ending = self.next_ids()[:1]
        return stop_ids | (self._added & frozenset(ending))

    def _scaffold_ids(self, text: str) -> list[int]:
        return self._scaffold.encode(text, add_special_tokens=False).ids


def _check_characters(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError("the text is not UTF-8; set the terminal to UTF-8, or convert it")
