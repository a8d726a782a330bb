"""Bytes of a cache: planned, live and reported numbers, all from here. Knows shapes and formats, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvchat.kv.format import KVFormat, Ranked
from kvchat.kv.shape import CacheShape, LayerShape


@dataclass(frozen=True)
class Usage:
    """What a cache of `tokens` tokens takes, and what fp16 would take for the same tokens. Bytes."""

    format_name: str
    tokens: int
    in_use: int
    fp16: int
    true_bits: float  # of a packed element, scales and zeros included; the window and the sink are apart

    @property
    def ratio(self) -> float:
        return self.fp16 / self.in_use if self.in_use else 1.0


def usage(
    shape: CacheShape, fmt: KVFormat, tokens: int, dense_bytes: int, in_use: int | None = None
) -> Usage:
    """The numbers of a cache that holds `tokens` tokens: measured where `in_use` is given, planned otherwise.

    dense_bytes: bytes an element in model precision (2 or 4): window, sink and sliding layers.
    """
    if in_use is None:
        in_use = sum(_layer_bytes(layer, fmt, tokens, dense_bytes) for layer in shape.layers)
    fp16 = sum(4 * layer.kv_heads * layer.head_dim * _kept(layer, tokens) for layer in shape.layers)
    return Usage(fmt.name, tokens, in_use, fp16, true_bits(shape, fmt))


def true_bits(shape: CacheShape, fmt: KVFormat) -> float:
    """Mean true bits of a packed element over the layers that are packed."""
    elements = [layer.kv_heads * layer.head_dim for layer in shape.packable]
    bits = [fmt.true_bits(layer.head_dim, layer.kv_heads) for layer in shape.packable]
    return sum(e * b for e, b in zip(elements, bits, strict=True)) / sum(elements) if elements else 16.0


def fits(shape: CacheShape, fmt: KVFormat, dense_bytes: int, free: int) -> int:
    """The most tokens whose cache takes at most `free` bytes, by bisection; 0 where none does."""
    low, high = 0, 1
    while usage(shape, fmt, high, dense_bytes).in_use <= free:
        low, high = high, high * 2
        if high > 1 << 40:  # every layer slides: the cache is bounded
            return high
    while high - low > 1:
        middle = (low + high) // 2
        if usage(shape, fmt, middle, dense_bytes).in_use <= free:
            low = middle
        else:
            high = middle
    return low


def _kept(layer: LayerShape, tokens: int) -> int:
    # a sliding layer of transformers keeps one less than its window: the newest token brings itself
    return tokens if layer.window is None else min(tokens, layer.window - 1)


def _layer_bytes(layer: LayerShape, fmt: KVFormat, tokens: int, dense_bytes: int) -> int:
    elements = layer.kv_heads * layer.head_dim
    if layer.window is not None:
        return 2 * elements * dense_bytes * _kept(layer, tokens)
    beyond_window = max(0, tokens - fmt.window)
    packed = max(0, beyond_window - fmt.sink) // fmt.block * fmt.block
    ranking = elements // 2 if packed and isinstance(fmt.keys, Ranked) else 0
    return (
        ranking
        + 2 * elements * dense_bytes * (tokens - packed)
        + sum(
            round(packed * elements * quant.true_bits(layer.head_dim, layer.kv_heads) / 8)
            for quant in (fmt.keys, fmt.values)
        )
    )


def human(count: float) -> str:
    """Bytes for people: 1.5 GiB, 320 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} {units[0]}" if units[0] == "B" or count >= 100 else f"{count:.1f} {units[0]}"
