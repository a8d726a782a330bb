"""The tokenizer and the chat template of a model's folder, without the seconds that importing transformers' takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvchat.errors import ModelNotFound, ModelRefused


class FolderTokenizer:
    """What `Prompt` and `Session` need of transformers' fast tokenizers, by the same names."""

    def __init__(self, folder: Path):
        """folder: a model's, or the path of its config.json.

        Raises ModelNotFound where there is no tokenizer.json, ModelRefused for files that cannot be used."""
        folder = folder if folder.is_dir() else folder.parent
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelNotFound(
                f"{folder} has no tokenizer.json to count with; pull the model, or use --tokens N"
            )
        try:
            self.backend_tokenizer: Tokenizer = Tokenizer.from_file(str(file))
            config = _json(folder / "tokenizer_config.json")
            self._named = _named_tokens(_json(folder / "special_tokens_map.json") | config)
            self.chat_template = _chat_template(folder, config)
            missing = [
                token["content"]
                for token in config.get("added_tokens_decoder", {}).values()
                if self.backend_tokenizer.token_to_id(token["content"]) is None
            ]
        except Exception as error:  # the files are foreign, and `tokenizers` raises bare Exception
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelRefused(
                f"the tokenizer in {folder} cannot be used ({reason}); pull the model again"
            ) from None
        if missing:
            raise ModelRefused(
                f"tokenizer.json in {folder} lacks the token {missing[0]}; pull the model again"
            )

    @property
    def eos_token_id(self) -> int | None:
        token = self._named.get("eos_token")
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        """The conversation as text, rendered in transformers' sandbox. Raises whatever the template raises."""
        from transformers.utils.chat_template_utils import render_jinja_template

        settings.pop("tokenize", None)
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=self.chat_template, **settings, **self._named
        )
        return rendered[0]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates and stop ids go by."""
    named = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template called default, wherever this model keeps it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template or None
