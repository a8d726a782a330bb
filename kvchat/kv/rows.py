"""`PackedRows`: the packed tokens of one layer, of its keys or of its values."""

import math

import torch
from torch import Tensor

from kvchat.kv import ops
from kvchat.kv.format import Quant

GROWTH = 1024
"""Tokens added to the buffers when what was reserved is full: a multiple of every block."""


class PackedRows:
    """Append-only rows of tokens, [heads, T, head_dim] when read, stored as `Quant` says.

    The buffers are reserved for a known number of tokens and grow when that is passed. A row is written once; the caller
    says where, and writing at an earlier place forgets what followed it.
    """

    def __init__(self, quant: Quant, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.quant, self.dtype = quant, dtype
        sixteen = torch.float16 if dtype == torch.float32 else dtype
        if quant.packed:
            metadata = (
                (quant.group, head_dim) if quant.axis == "channel" else (1, math.ceil(head_dim / quant.group))
            )
            layout = [
                (1, head_dim * quant.bits // 8, torch.uint8),
                (*metadata, torch.float16),
                (*metadata, torch.float16),
            ]
        else:
            layout = [(1, head_dim, torch.float32 if quant.bits == 32 else sixteen)]
        self._tokens_a_row = [tokens for tokens, _, _ in layout]
        self._buffers = [torch.empty(heads, 0, width, dtype=kind, device=device) for _, width, kind in layout]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all, so that appending up to there allocates nothing."""
        for i, (buffer, per_row) in enumerate(zip(self._buffers, self._tokens_a_row, strict=True)):
            rows = math.ceil(tokens / per_row)
            if rows > buffer.shape[1]:
                larger = buffer.new_empty(buffer.shape[0], rows, buffer.shape[2])
                larger[:, : buffer.shape[1]] = buffer
                self._buffers[i] = larger

    def append(self, at: int, x: Tensor) -> None:
        """Store x [heads, n, head_dim] as tokens at .. at + n; n and `at` are multiples of the block."""
        end = at + x.shape[1]
        if end > self._buffers[0].shape[1]:
            self.reserve(end + GROWTH)
        quant = self.quant
        parts = ops.quantize(x, quant.bits, quant.axis, quant.group) if quant.packed else (x,)
        for buffer, per_row, part in zip(self._buffers, self._tokens_a_row, parts, strict=True):
            buffer[:, at // per_row : end // per_row] = part

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start .. stop in model precision: [heads, stop - start, head_dim]; both are multiples of the block."""
        quant, parts = self.quant, self._rows(start, stop)
        if not quant.packed:
            return parts[0].to(self.dtype)
        return ops.dequantize(*parts, quant.bits, quant.axis, quant.group, self.dtype)

    def nbytes(self, tokens: int) -> int:
        """Bytes that the first `tokens` take; what is reserved beyond them is not counted."""
        return sum(part.nbytes for part in self._rows(0, tokens))

    @property
    def reserved_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def _rows(self, start: int, stop: int) -> list[Tensor]:
        return [
            buffer[:, start // per_row : stop // per_row]
            for buffer, per_row in zip(self._buffers, self._tokens_a_row, strict=True)
        ]
