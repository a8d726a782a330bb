"""`PackedRows`: the packed tokens of one layer, of its keys or of its values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.kv import ops
from kvchat.kv.calibration import Ranges
from kvchat.kv.format import NonUniform, Quant, Ranked, Rotated

GROWTH = 1024
"""Tokens added to the buffers when what was reserved is full: a multiple of every block."""


@dataclass(frozen=True)
class Field:
    """One buffer of stored rows, [heads, rows, width] of `dtype`: a row holds `tokens` tokens."""

    name: str
    heads: int  # 1 where the row serves all heads
    tokens: int
    width: int
    dtype: torch.dtype


def fields(
    quant: Quant | Ranked | Rotated | NonUniform, heads: int, head_dim: int, dtype: torch.dtype
) -> list[Field]:
    """How `quant` lies in memory and on disk, for a model of type `dtype`."""
    if isinstance(quant, Ranked):
        block = sum(quant.bits_by_rank(head_dim)) * quant.group // 8
        return [
            Field("codes", heads, quant.group, block, torch.uint8),
            Field("scale", heads, quant.group, head_dim, torch.uint8),
            Field("zero", heads, quant.group, head_dim, torch.float16),
        ]
    if not quant.packed:
        assert isinstance(quant, Quant)
        sixteen = torch.float16 if dtype == torch.float32 else dtype
        return [Field("elements", heads, 1, head_dim, torch.float32 if quant.bits == 32 else sixteen)]
    codes = Field("codes", heads, 1, head_dim * quant.bits // 8, torch.uint8)
    if isinstance(quant, Rotated):
        return [codes, Field("scale", heads, 1, 1, torch.uint8)]
    if isinstance(quant, NonUniform):
        count = quant.outliers_of(heads * head_dim)
        of_token = [Field(name, 1, 1, 1, torch.float16) for name in ("zero", "radius")]
        return [
            codes,
            *(of_token if quant.axis == "token" else ()),
            Field("outliers", 1, 1, count, torch.float16),
            Field("places", 1, 1, count, torch.int16),
        ]
    tokens, width = (
        (quant.group, head_dim) if quant.axis == "channel" else (1, math.ceil(head_dim / quant.group))
    )
    return [codes, *(Field(name, heads, tokens, width, torch.float16) for name in ("scale", "zero"))]


class PackedRows:
    """Append-only rows of tokens, [heads, T, head_dim] when read, stored as `Quant` says.

    The buffers are reserved for a known number of tokens and grow when that is passed. A row is written once; the caller
    says where, and writing at an earlier place forgets what followed it.
    """

    def __init__(
        self,
        quant: Quant | Ranked | Rotated | NonUniform,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        ranges: Ranges | None = None,
    ):
        """ranges: what `quant` needs of the model's calibration, where it is NonUniform."""
        self.quant, self.dtype, self.ranges = quant, dtype, ranges
        self.order: Tensor | None = None  # [heads, head_dim]: channels by rank, where `quant` is Ranked
        self._bits = quant.bits_by_rank(head_dim) if isinstance(quant, Ranked) else ()
        self.fields = fields(quant, heads, head_dim, dtype)
        self._buffers = [
            torch.empty(field.heads, 0, field.width, dtype=field.dtype, device=device)
            for field in self.fields
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
        self.write(at, at + x.shape[1], self._encode(x))

    def write(self, at: int, end: int, parts: Sequence[Tensor]) -> None:
        """Store tokens at .. end as `stored` returned them, one tensor a field."""
        if end > self._buffers[0].shape[1] * self.fields[0].tokens:
            self.reserve(end + GROWTH)
        for buffer, field, part in zip(self._buffers, self.fields, parts, strict=True):
            buffer[:, at // field.tokens : end // field.tokens] = part

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start .. stop in model precision: [heads, stop - start, head_dim]; both are multiples of the block."""
        quant, parts = self.quant, self.stored(start, stop)
        if isinstance(quant, Ranked):
            ranked = ops.dequantize_ranked(parts[0], parts[1], parts[2], self._bits, quant.group, self.dtype)
            assert self.order is not None
            return torch.empty_like(ranked).scatter_(2, self.order[:, None].expand_as(ranked), ranked)
        if isinstance(quant, Rotated):
            return ops.dequantize_rotated(parts[0], parts[1], quant.bits, self.dtype)
        if isinstance(quant, NonUniform):
            ranges = self.ranges
            assert ranges is not None
            zero, radius = (ranges.zero, ranges.radius) if quant.axis == "channel" else parts[1:3]
            return ops.dequantize_nonuniform(
                parts[0], zero, radius, parts[-2], parts[-1], ranges.levels, quant.bits, self.dtype
            )
        if not quant.packed:
            return parts[0].to(self.dtype)
        return ops.dequantize(*parts, quant.bits, quant.axis, quant.group, self.dtype)

    def packed(self, tokens: int) -> ops.Packed | ops.PackedRanked | ops.PackedRotated:
        """The first `tokens` as they lie in memory, for kernels that read codes; only of a format that is `fused`."""
        quant, parts = self.quant, self.stored(0, tokens)
        if isinstance(quant, Ranked):
            assert self.order is not None
            return ops.PackedRanked(parts[0], parts[1], parts[2], self.order, self._bits, quant.group)
        if isinstance(quant, Rotated):
            return ops.PackedRotated(parts[0], parts[1], quant.bits)
        assert isinstance(quant, Quant)
        codes, scale, zero = parts
        return ops.Packed(codes, scale, zero, quant.bits, quant.axis, quant.group)

    def _encode(self, x: Tensor) -> Sequence[Tensor]:
        quant = self.quant
        if isinstance(quant, Ranked):
            assert self.order is not None
            return ops.quantize_ranked(x.gather(2, self.order[:, None].expand_as(x)), self._bits, quant.group)
        if isinstance(quant, Rotated):
            return ops.quantize_rotated(x, quant.bits)
        if isinstance(quant, NonUniform):
            ranges, count = self.ranges, quant.outliers_of(x.shape[0] * x.shape[2])
            assert ranges is not None
            if quant.axis == "token":
                return ops.quantize_tokens(x, ranges.levels, quant.bits, count)
            return ops.quantize_channels(x, ranges.zero, ranges.radius, ranges.levels, quant.bits, count)
        return ops.quantize(x, quant.bits, quant.axis, quant.group) if quant.packed else (x,)

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
