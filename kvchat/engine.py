"""`Engine`: token ids in, token ids out. Knows nothing of text, documents or turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from kvchat.errors import DoesNotFit, UsageError
from kvchat.kv import step
from kvchat.kv.cache import KVCache
from kvchat.kv.calibration import Calibration
from kvchat.kv.format import KVFormat
from kvchat.kv.step import DecodeStep

CHUNK, GPU_CHUNK = 512, 2048
"""Tokens a prefill chunk. Later chunks read earlier ones out of the packed cache, so the state depends on it. With fewer, a GPU
would wait for Python."""

SEGMENT = 2048
"""Tokens a segment of a long text. At its end the cache is closed (everything is packed), so that the state there needs no
window, costs nothing beyond its blocks to keep, and any text that begins alike can go on from it."""


COLDEST = 1e-3
"""The lowest temperature beside 0: logits divided by less could leave float32."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy: the likeliest token each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        for name, value, right in (
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or COLDEST <= self.temperature < math.inf,
            ),
            ("top-p", self.top_p, 0 < self.top_p <= 1),
            ("seed", self.seed, 0 <= self.seed < 2**63),
            ("max-tokens", self.max_tokens, self.max_tokens >= 1),
        ):
            if not right:
                raise UsageError(f"{value} is no value for {name}; see kvchat ask --help")


class Engine:
    """One model with one packed cache. `model` must run with kvchat's attention (`models.load`)."""

    def __init__(
        self,
        model: Any,
        fmt: KVFormat,
        chunk: int | None = None,
        segment: int = SEGMENT,
        calibration: Calibration | None = None,
    ):
        self.model, self.fmt, self.segment = model, fmt, segment
        self.chunk = chunk or (GPU_CHUNK if model.device.type == "cuda" else CHUNK)
        self.cache = KVCache(model, fmt, calibration)
        self._logits: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.cache.get_seq_length()

    def prefill(self, ids: Sequence[int]) -> Iterator[int]:
        """Read ids chunk by chunk, yielding the number of tokens in the cache after each; may be left at any yield."""
        for start in range(0, len(ids), self.chunk):
            self._forward(ids[start : start + self.chunk])
            yield self.tokens

    def ends(self, tokens: int) -> list[int]:
        """Where a text of `tokens` tokens is divided: the end of each whole segment, then `tokens` itself.

        After the last whole segment follows at least a window, so the newest tokens are exact as in a text that isn't
        divided. A segment is many windows long: few tokens read the ones just before them out of packed blocks.
        """
        segment = self.segment * math.ceil(8 * self.fmt.window / self.segment) or self.segment
        first = self.fmt.sink + segment
        return [*range(first, tokens - max(self.fmt.window, 1) + 1, segment), tokens]

    def generate(self, ids: Sequence[int], sampling: Sampling, stop_ids: frozenset[int]) -> Iterator[int]:
        """Read ids (at least one), then yield one token after another, until a stop id (not yielded) or `max_tokens`.

        A token is read into the cache when the next one is asked for; a caller that stops early has it still to read.
        """
        for _ in self.prefill(ids):
            pass
        generator = torch.Generator().manual_seed(sampling.seed)
        decode: DecodeStep | None = None
        for n in range(sampling.max_tokens):
            token = self._choose(sampling, generator)
            if token in stop_ids:
                return
            yield token
            if n + 1 == sampling.max_tokens:
                return
            if n == 0 and step.serves(self.model, self.cache):
                decode = DecodeStep(self.model, self.cache, sampling.max_tokens)
            self._forward([token], decode=decode)

    def choices(self, ids: Sequence[int]) -> list[int]:
        """Read ids as one chunk and return the likeliest next token after each of them."""
        self._forward(ids, keep=len(ids))
        assert self._logits is not None
        return self._logits.argmax(-1).tolist()

    @torch.no_grad()
    def _forward(self, ids: Sequence[int], keep: int = 1, decode: DecodeStep | None = None) -> None:
        try:
            if decode is not None:
                self._logits = decode(ids[0])
                return
            batch = torch.tensor([ids], device=self.model.device)
            self._logits = self.model(batch, cache=self.cache, use_cache=True, logits_to_keep=keep).logits[0]
        except torch.OutOfMemoryError:
            raise DoesNotFit(
                f"the device ran out of memory after {self.tokens} tokens; take a smaller --kv format or document"
            ) from None

    def _choose(self, sampling: Sampling, generator: torch.Generator) -> int:
        assert self._logits is not None
        if sampling.temperature == 0:
            return int(self._logits[-1].argmax())
        scores = self._logits[-1:].float().cpu()
        none = torch.empty(1, 0, dtype=torch.long)
        scores = TemperatureLogitsWarper(float(sampling.temperature))(none, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(none, scores)
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=generator))
