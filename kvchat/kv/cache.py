"""`PackedLayer` and `KVCache`: what transformers sees as its cache.

A layer's tokens lie in three parts, oldest first: the *sink* (model precision), the packed *blocks*, and the residual
*window* (model precision, with the chunk that is being read). `update` hands the layer itself to the attention function,
which reads it tile by tile; no dense history exists.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from kvchat.errors import KVChatError, ModelRefused
from kvchat.kv.format import KVFormat
from kvchat.kv.rope import Rope
from kvchat.kv.rows import PackedRows

TILE = 1024
"""Tokens a tile: a multiple of every block, few enough that a tile of keys and values stays in a core's cache."""


@dataclass(frozen=True)
class LayerMark:
    """A layer as it was: the dense parts themselves (they are replaced, never mutated) and how many blocks there were."""

    packed_tokens: int
    blocks: int
    next_position: int
    sink: tuple[Tensor, Tensor]
    window: tuple[Tensor, Tensor]


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer, [heads, tokens, head_dim], in a `KVFormat`. Batch size 1.

    `keys` and `values` are the window, [1, heads, n, head_dim]. Packed blocks are append-only and are never read in order
    to be written again. With `rope`, keys in blocks are stored before RoPE.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, fmt: KVFormat, rope: Rope | None = None):
        super().__init__()
        self.fmt, self.rope = fmt, rope
        self.packed_tokens = 0
        self.next_position = 0
        self.starts: list[int] = []  # position of the first token of each block
        self._reserved = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[0] != 1:
            raise KVChatError(
                f"a packed cache holds one sequence, not a batch of {key_states.shape[0]}; use one a sequence"
            )
        dtype, device = key_states.dtype, key_states.device
        # not slices, which would keep the whole first chunk alive
        self.keys, self.values = (
            x.new_empty(1, x.shape[1], 0, x.shape[3]) for x in (key_states, value_states)
        )
        self.sink = (self.keys, self.values)
        self.rows = tuple(
            PackedRows(quant, x.shape[1], x.shape[3], dtype, device)
            for quant, x in ((self.fmt.keys, key_states), (self.fmt.values, value_states))
        )
        self.is_initialized = True
        self.reserve(self._reserved)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` packed tokens."""
        self._reserved = tokens
        if self.is_initialized:
            for rows in self.rows:
                rows.reserve(tokens // self.fmt.block * self.fmt.block)

    def update(  # the attention function takes the layer itself
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> "tuple[PackedLayer, PackedLayer]":
        """Append a chunk [1, heads, T, head_dim]. What fell out of the window is packed first: a chunk sees itself exactly."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.flush()
        assert self.keys is not None and self.values is not None
        self.keys = torch.cat([self.keys, key_states], 2)
        self.values = torch.cat([self.values, value_states], 2)
        self.next_position += key_states.shape[2]
        return self, self

    def flush(self) -> None:
        """Move what is older than the window into the sink, then into whole blocks."""
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        length = self.keys.shape[2]
        to_sink = max(0, min(self.fmt.sink - self.sink[0].shape[2], length - self.fmt.window))
        blocks = max(0, length - to_sink - self.fmt.window) // self.fmt.block
        leaving = to_sink + blocks * self.fmt.block
        if leaving == 0:
            return
        if to_sink:
            self.sink = (
                torch.cat([self.sink[0], self.keys[:, :, :to_sink]], 2),
                torch.cat([self.sink[1], self.values[:, :, :to_sink]], 2),
            )
        if blocks:
            position = self.next_position - length + to_sink
            self._pack(self.keys[0, :, to_sink:leaving], self.values[0, :, to_sink:leaving], position)
        # a copy, so that the chunk's memory is given back
        self.keys = self.keys[:, :, leaving:].clone()
        self.values = self.values[:, :, leaving:].clone()

    def _pack(self, keys: Tensor, values: Tensor, position: int) -> None:
        count = keys.shape[1]
        if self.rope is not None:
            keys = self.rope.unrotate(keys, torch.arange(position, position + count, device=keys.device))
        self.rows[0].append(self.packed_tokens, keys)
        self.rows[1].append(self.packed_tokens, values)
        self.starts += range(position, position + count, self.fmt.block)
        self.packed_tokens += count

    def tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of the first token, keys, values), oldest first, in model precision: [heads, n, head_dim].

        Only the last one, the window, can hold tokens that a query of the newest chunk may not see.
        """
        assert self.keys is not None and self.values is not None
        sink = self.sink[0].shape[2]
        if sink:
            yield 0, self.sink[0][0], self.sink[1][0]
        for start in range(0, self.packed_tokens, TILE):
            stop = min(start + TILE, self.packed_tokens)
            keys = self.rows[0].read(start, stop)
            if self.rope is not None:
                keys = self.rope.rotate(keys, self._positions(start, stop))
            yield sink + start, keys, self.rows[1].read(start, stop)
        yield sink + self.packed_tokens, self.keys[0], self.values[0]

    def _positions(self, start: int, stop: int) -> Tensor:
        assert self.keys is not None
        block = self.fmt.block
        first = torch.tensor(self.starts[start // block : stop // block], device=self.keys.device)
        return (first[:, None] + torch.arange(block, device=self.keys.device)).flatten()

    def mark(self) -> LayerMark:
        assert self.keys is not None and self.values is not None
        return LayerMark(
            self.packed_tokens, len(self.starts), self.next_position, self.sink, (self.keys, self.values)
        )

    def rewind(self, mark: LayerMark) -> None:
        """Go back to a mark of this layer; marks made after that one are void."""
        self.packed_tokens, self.next_position = mark.packed_tokens, mark.next_position
        del self.starts[mark.blocks :]
        self.sink, (self.keys, self.values) = mark.sink, mark.window

    def get_seq_length(self) -> int:
        if self.keys is None:
            return 0
        return self.sink[0].shape[2] + self.packed_tokens + self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__(self.fmt, self.rope)  # type: ignore[misc]

    @property
    def _dense_bytes(self) -> int:
        assert self.keys is not None and self.values is not None
        return sum(t.nbytes for t in (*self.sink, self.keys, self.values))

    @property
    def nbytes(self) -> int:
        """Bytes in use: sink, packed blocks and window."""
        if self.keys is None:
            return 0
        return self._dense_bytes + sum(rows.nbytes(self.packed_tokens) for rows in self.rows)

    @property
    def reserved_bytes(self) -> int:
        """Bytes allocated: `nbytes`, and rows that are reserved but not yet written."""
        if self.keys is None:
            return 0
        return self._dense_bytes + sum(rows.reserved_bytes for rows in self.rows)


class KVCache(Cache):
    """One `PackedLayer` for each full-attention layer of `model`; sliding layers are bounded and stay dense.

    Raises ModelRefused for any other kind of layer, by name.
    """

    def __init__(self, model: Any, fmt: KVFormat):
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None):
            raise ModelRefused(
                f"{config.model_type} keeps latent keys and values (MLA), which kvchat cannot pack yet"
            )
        decoder = model.get_decoder()
        layers = []
        for layer, kind, settings in zip(decoder.layers, *get_layer_types_and_kwargs(config), strict=True):
            if kind == "sliding_attention":
                layers.append(DynamicSlidingWindowLayer(**settings))
            elif kind == "full_attention":
                attention = layer.self_attn
                rotated = fmt.pre_rope and getattr(attention, "use_rope", True)
                layers.append(
                    PackedLayer(fmt, Rope(decoder.rotary_emb, attention, kind) if rotated else None)
                )
            else:
                raise ModelRefused(
                    f"{config.model_type} has a layer of type {kind!r}; kvchat serves full and sliding attention"
                )
        super().__init__(layers=layers)
        self.fmt = fmt

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in every packed layer, so that reading up to there allocates nothing."""
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.reserve(tokens)

    def seal(self) -> None:
        """Flush every layer, so that the state depends on the tokens, the format and the chunk size alone."""
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.flush()

    def snapshot(self) -> list[Any]:
        """The state as it is now, for `restore`. Cheap: it copies no block."""
        return [layer.mark() if isinstance(layer, PackedLayer) else copy.copy(layer) for layer in self.layers]

    def restore(self, snapshot: list[Any]) -> None:
        """Go back to a snapshot of this cache, exactly; snapshots taken after it are void."""
        for i, (layer, mark) in enumerate(zip(self.layers, snapshot, strict=True)):
            if isinstance(layer, PackedLayer):
                layer.rewind(mark)
            else:
                self.layers[i] = copy.copy(mark)

    @property
    def nbytes(self) -> int:
        """Bytes in use: the sum over all tensors that hold tokens."""
        return self._sum("nbytes")

    @property
    def reserved_bytes(self) -> int:
        """Bytes allocated, rows that are not yet written included."""
        return self._sum("reserved_bytes")

    def _sum(self, attribute: str) -> int:
        return sum(
            getattr(layer, attribute)
            if isinstance(layer, PackedLayer)
            else sum(t.nbytes for t in (layer.keys, layer.values) if t is not None)
            for layer in self.layers
        )
