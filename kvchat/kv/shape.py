"""`CacheShape`: the layers of a model that keep keys and values. Knows no tensors, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    kv_heads: int
    head_dim: int
    window: int | None = None  # sliding window in tokens; None for full attention


@dataclass(frozen=True)
class CacheShape:
    """The layers of a model that keep keys and values."""

    layers: tuple[LayerShape, ...]

    @property
    def packable(self) -> tuple[LayerShape, ...]:
        return tuple(layer for layer in self.layers if layer.window is None)
