"""`PackedLayer`: the keys and values of one layer, as transformers' cache layer.

A layer's tokens lie in three parts, oldest first: the *sink* (model precision), the packed *blocks*, and the residual
*window* (model precision, with the chunk that is being read). `update` hands the layer itself to the attention function,
which reads it tile by tile; no dense history exists.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvchat.errors import KVChatError
from kvchat.kv import ops
from kvchat.kv.calibration import Ranges
from kvchat.kv.format import KVFormat, Ranked
from kvchat.kv.rope import Rope
from kvchat.kv.rows import PackedRows, fields

TILE = 1024
"""Tokens a tile: a multiple of every block, few enough that a tile of keys and values stays in a core's cache."""

GPU_TILE = 2**25
"""Elements of a tile's keys on a GPU, 64 MiB in 16 bits: enough that launching kernels takes no time beside running them."""


@dataclass(frozen=True)
class LayerMark:
    """A layer as it was: the dense parts themselves (they are replaced, never mutated) and how many blocks there were."""

    packed_tokens: int
    blocks: int
    next_position: int
    sink: tuple[Tensor, Tensor]
    window: tuple[Tensor, Tensor]
    ranking: tuple[Tensor, Tensor]


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of tensors by name."""


def part_layout(
    fmt: KVFormat, heads: int, head_dim: int, dtype: torch.dtype, start: int, stop: int, closed: bool
) -> Layout:
    """What `PackedLayer.part(start)` returns at `stop` tokens, closed or sealed."""
    sink = min(fmt.sink, stop) if start == 0 else 0
    if start == 0 and not closed:
        sink = max(0, min(fmt.sink, stop - fmt.window))
    window = 0 if closed else fmt.window
    packed = max(0, stop - start - sink - window) // fmt.block * fmt.block
    dense = stop - start - sink - packed
    layout: Layout = {
        "starts": ((packed // fmt.block,), torch.int64),
        "next_position": ((1,), torch.int64),
        "window.keys": ((1, heads, dense, head_dim), dtype),
        "window.values": ((1, heads, dense, head_dim), dtype),
    }
    if start == 0 and isinstance(fmt.keys, Ranked):
        ranked = (heads, head_dim // 2) if packed else (heads, 0)
        observed = (heads, 0) if packed else (heads, head_dim // 2)
        layout |= {"rank": (ranked, torch.uint8), "query_power": (observed, torch.float32)}
    if start == 0:
        layout |= {f"sink.{what}": ((1, heads, sink, head_dim), dtype) for what in ("keys", "values")}
    for what, quant in (("keys", fmt.keys), ("values", fmt.values)):
        for field in fields(quant, heads, head_dim, dtype):
            layout[f"{what}.{field.name}"] = ((field.heads, packed // field.tokens, field.width), field.dtype)
    return layout


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer, [heads, tokens, head_dim], in a `KVFormat`. Batch size 1.

    `keys` and `values` are the window, [1, heads, n, head_dim]. Packed blocks are append-only and are never read in order
    to be written again. With `rope`, keys in blocks are stored before RoPE.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(
        self,
        fmt: KVFormat,
        rope: Rope | None = None,
        ranges: tuple[Ranges | None, Ranges | None] = (None, None),
    ):
        """ranges: of keys and of values, from the model's calibration, where the format needs them."""
        super().__init__()
        self.fmt, self.rope, self.ranges = fmt, rope, ranges
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
            PackedRows(quant, x.shape[1], x.shape[3], dtype, device, ranges)
            for quant, x, ranges in zip(
                (self.fmt.keys, self.fmt.values), (key_states, value_states), self.ranges, strict=True
            )
        )
        # pairs of channels by rank, once the first block was packed; what the queries before that were like
        self.rank = torch.empty(key_states.shape[1], 0, dtype=torch.uint8, device=device)
        self.query_power = torch.empty(key_states.shape[1], 0, device=device)
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

    def flush(self, window: int | None = None) -> None:
        """Move what is older than the `window` newest tokens (by default the format's) to the sink, then to whole blocks."""
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        length = self.keys.shape[2]
        window = self.fmt.window if window is None else window
        to_sink = max(0, min(self.fmt.sink - self.sink[0].shape[2], length - window))
        blocks = max(0, length - to_sink - window) // self.fmt.block
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
        if isinstance(self.fmt.keys, Ranked) and not self.rank.numel():
            self._set_ranking(_rank(keys, self.query_power), self.query_power[:, :0])
        self.rows[0].append(self.packed_tokens, keys)
        self.rows[1].append(self.packed_tokens, values)
        self.starts += range(position, position + count, self.fmt.block)
        self.packed_tokens += count

    def observe(self, query: Tensor) -> None:
        """Note the mean square of the first chunk's queries [Hq, T, D], over the heads that share a key head and over RoPE
        pairs, within which it does not depend on the position."""
        if not isinstance(self.fmt.keys, Ranked) or self.rank.numel() or self.query_power.numel():
            return
        heads, channels = self.query_power.shape[0], query.shape[2]
        power = query.float().square().mean(1).view(heads, -1, channels).mean(1)
        self.query_power = power.view(heads, 2, channels // 2).mean(1)

    def _set_ranking(self, rank: Tensor, query_power: Tensor) -> None:
        self.rank, self.query_power = rank, query_power
        first = rank.long()
        self.rows[0].order = (
            torch.stack([first, first + rank.shape[1]], 2).flatten(1) if rank.numel() else None
        )

    def packed(self, room: int = 0) -> tuple[Any, Any, tuple[Tensor, Tensor] | None] | None:
        """Packed keys, packed values, and cos and sin of the keys' positions where they were packed before RoPE.

        None where no kernel reads them (see `tiles`), or nothing is packed yet. room: with rows for so many more tokens, which
        are reserved and not yet written.
        """
        if not self.packed_tokens or not self.fmt.fused:
            return None
        assert self.keys is not None
        ranked = isinstance(self.fmt.keys, Ranked)
        if not ops.reads_codes(self.keys.device, self.keys.shape[3], ranked):
            return None
        if self.rope is not None and not self.rope.halves:
            return None
        tokens = self.packed_tokens + room // self.fmt.block * self.fmt.block
        if room:
            self.reserve(max(self._reserved, tokens))
        keys, values = (rows.packed(tokens) for rows in self.rows)
        return keys, values, self._rope(tokens)

    def _rope(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin [tokens, head_dim] of packed tokens, and of those that will follow."""
        if self.rope is None:
            return None
        first, block = self.starts[0], self.fmt.block
        further = tokens - self.packed_tokens
        end = max(self.starts) + block + further
        table = self.rope.table(end, by_channel=isinstance(self.fmt.keys, Ranked))
        if self.starts == list(range(first, first + self.packed_tokens, block)):
            cos, sin = table[:, first : first + tokens]  # a view, not a copy a layer and token
        else:
            positions = self._positions(0, self.packed_tokens)
            cos, sin = table[:, torch.cat([positions, torch.arange(end - further, end).to(positions)])]
        return cos, sin

    def tiles(self, packed: bool = True) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of the first token, keys, values), oldest first, in model precision: [heads, n, head_dim].

        Only the last one, the window, can hold tokens that a query of the newest chunk may not see. Without `packed`,
        sink and window alone.
        """
        assert self.keys is not None and self.values is not None
        sink = self.sink[0].shape[2]
        if sink:
            yield 0, self.sink[0][0], self.sink[1][0]
        tile = TILE
        if self.keys.is_cuda:
            tile = GPU_TILE // (self.keys.shape[1] * self.keys.shape[3] * TILE) * TILE
        for start in range(0, self.packed_tokens if packed else 0, tile):
            stop = min(start + tile, self.packed_tokens)
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
            self.packed_tokens,
            len(self.starts),
            self.next_position,
            self.sink,
            (self.keys, self.values),
            (self.rank, self.query_power),
        )

    def rewind(self, mark: LayerMark) -> None:
        """Go back to a mark of this layer; marks made after that one are void."""
        self.packed_tokens, self.next_position = mark.packed_tokens, mark.next_position
        del self.starts[mark.blocks :]
        self.sink, (self.keys, self.values) = mark.sink, mark.window
        self._set_ranking(*mark.ranking)

    def part(self, start: int) -> dict[str, Tensor]:
        """What came after the first `start` tokens, where everything was packed at that point; see `part_layout`."""
        assert self.keys is not None and self.values is not None
        first = max(0, start - self.fmt.sink)
        tensors = {
            "starts": torch.tensor(self.starts[first // self.fmt.block :], dtype=torch.int64),
            "next_position": torch.tensor([self.next_position]),
            "window.keys": self.keys,
            "window.values": self.values,
        }
        if start == 0 and isinstance(self.fmt.keys, Ranked):
            tensors |= {"rank": self.rank, "query_power": self.query_power}
        if start == 0:
            tensors |= {"sink.keys": self.sink[0], "sink.values": self.sink[1]}
        for what, rows in zip(("keys", "values"), self.rows, strict=True):
            for field, stored in zip(rows.fields, rows.stored(first, self.packed_tokens), strict=True):
                tensors[f"{what}.{field.name}"] = stored
        return tensors

    def adopt(self, part: Mapping[str, Tensor]) -> None:
        """Append what `part` returned, copying it; `part` must have the layout that belongs here."""
        if not self.is_initialized:
            self.lazy_initialization(part["window.keys"][:, :, :0], part["window.values"][:, :, :0])
        if "rank" in part:
            self._set_ranking(part["rank"].clone(), part["query_power"].clone())
        starts = part["starts"].tolist()
        stop = self.packed_tokens + len(starts) * self.fmt.block
        for what, rows in zip(("keys", "values"), self.rows, strict=True):
            rows.write(self.packed_tokens, stop, [part[f"{what}.{field.name}"] for field in rows.fields])
        self.packed_tokens, self.next_position = stop, int(part["next_position"])
        self.starts += starts
        self.keys, self.values = (part[f"window.{w}"].clone() for w in ("keys", "values"))
        if "sink.keys" in part:
            self.sink = (part["sink.keys"].clone(), part["sink.values"].clone())

    def get_seq_length(self) -> int:
        if self.keys is None:
            return 0
        return self.sink[0].shape[2] + self.packed_tokens + self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__(self.fmt, self.rope, self.ranges)  # type: ignore[misc]

    @property
    def _dense_bytes(self) -> int:
        assert self.keys is not None and self.values is not None
        return sum(t.nbytes for t in (*self.sink, self.keys, self.values, self.rank))

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


def _rank(keys: Tensor, query_power: Tensor) -> Tensor:
    """Pairs of channels by what an error in them does to the scores: variance of the keys [heads, T, D] times the queries'
    mean square [heads, D / 2], both averaged over the pair. Returns [heads, D / 2], uint8, the most important first."""
    heads, _, channels = keys.shape
    spread = keys.float().var(1).view(heads, 2, channels // 2).mean(1)
    return (spread * query_power).argsort(dim=1, descending=True, stable=True).to(torch.uint8)
