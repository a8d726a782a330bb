"""`PackedRows`: the packed tokens of one layer, of its keys or of its values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.kv import ops
from kvchat.kv.format import Quant

GROWTH = 1024
"""Tokens added to the buffers when what was reserved is full: a multiple of every block."""


@dataclass(frozen=True)
class Field:
    """One buffer of stored rows: a row [heads, `width`] of `dtype` holds `tokens` tokens."""

    name: str
    tokens: int
    width: int
    dtype: torch.dtype


def fields(quant: Quant, head_dim: int, dtype: torch.dtype) -> list[Field]:
    """How `quant` lies in memory and on disk, for a model of type `dtype`."""
    if not quant.packed:
        sixteen = torch.float16 if dtype == torch.float32 else dtype
        return [Field("elements", 1, head_dim, torch.float32 if quant.bits == 32 else sixteen)]
    tokens, width = (
        (quant.group, head_dim) if quant.axis == "channel" else (1, math.ceil(head_dim / quant.group))
    )
    return [
        Field("codes", 1, head_dim * quant.bits // 8, torch.uint8),
        Field("scale", tokens, width, torch.float16),
        Field("zero", tokens, width, torch.float16),
    ]


class PackedRows:
    """Append-only rows of tokens, [heads, T, head_dim] when read, stored as `Quant` says.

    The buffers are reserved for a known number of tokens and grow when that is passed. A row is written once; the caller
    says where, and writing at an earlier place forgets what followed it.
    """

    def __init__(self, quant: Quant, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.quant, self.dtype = quant, dtype
        self.fields = fields(quant, head_dim, dtype)
        self._buffers = [
            torch.empty(heads, 0, field.width, dtype=field.dtype, device=device) for field in self.fields
        ]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all, so that appending up to there allocates nothing."""
        for i, (buffer, field) in enumerate(zip(self._buffers, self.fields, strict=True)):
            rows = math.ceil(tokens / field.tokens)
            if rows > buffer.shape[1]:
                larger = buffer.new_empty(buffer.shape[0], rows, buffer.shape[2])
                larger[:, : buffer.shape[1]] = buffer
                self._buffers[i] = larger

    def append(self, at: int, x: Tensor) -> None:
        """Store x [heads, n, head_dim] as tokens at .. at + n; n and `at` are multiples of the block."""
        quant = self.quant
        parts = ops.quantize(x, quant.bits, quant.axis, quant.group) if quant.packed else (x,)
        self.write(at, at + x.shape[1], parts)

    def write(self, at: int, end: int, parts: Sequence[Tensor]) -> None:
        """Store tokens at .. end as `stored` returned them, one tensor a field."""
        if end > self._buffers[0].shape[1]:
            self.reserve(end + GROWTH)
        for buffer, field, part in zip(self._buffers, self.fields, parts, strict=True):
            buffer[:, at // field.tokens : end // field.tokens] = part

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start .. stop in model precision: [heads, stop - start, head_dim]; both are multiples of the block."""
        quant, parts = self.quant, self.stored(start, stop)
        if not quant.packed:
            return parts[0].to(self.dtype)
        return ops.dequantize(*parts, quant.bits, quant.axis, quant.group, self.dtype)

    def nbytes(self, tokens: int) -> int:
        """Bytes that the first `tokens` take; what is reserved beyond them is not counted."""
        return sum(part.nbytes for part in self.stored(0, tokens))

    @property
    def reserved_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def stored(self, start: int, stop: int) -> list[Tensor]:
        """Tokens start .. stop as they lie in memory: a view of each field, [heads, rows, width]."""
        return [
            buffer[:, start // field.tokens : stop // field.tokens]
            for buffer, field in zip(self._buffers, self.fields, strict=True)
        ]
