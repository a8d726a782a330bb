"""`KVCache`: what transformers sees as its cache: packed layers for full attention, dense ones where attention slides."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from kvchat.errors import KVChatError, ModelRefused
from kvchat.kv.calibration import Calibration
from kvchat.kv.format import KVFormat
from kvchat.kv.layer import Layout, PackedLayer, part_layout
from kvchat.kv.rope import Rope
from kvchat.kv.shape import CacheShape


def layout(
    shape: CacheShape, fmt: KVFormat, dtype: torch.dtype, start: int, stop: int, closed: bool
) -> Layout:
    """What `KVCache.part(start)` returns at `stop` tokens, closed or sealed."""
    names: Layout = {}
    for i, layer in enumerate(shape.layers):
        if layer.window is None:
            own = part_layout(fmt, layer.kv_heads, layer.head_dim, dtype, start, stop, closed)
        else:
            kept = (1, layer.kv_heads, min(stop, layer.window - 1), layer.head_dim)
            own = {"keys": (kept, dtype), "values": (kept, dtype), "tokens": ((1,), torch.int64)}
        names |= {f"{i}.{name}": what for name, what in own.items()}
    return names


class KVCache(Cache):
    """One `PackedLayer` for each full-attention layer of `model`; sliding layers are bounded and stay dense.

    Raises ModelRefused for any other kind of layer, by name, and KVChatError where `fmt` needs a calibration of the model and
    none is given.
    """

    def __init__(self, model: Any, fmt: KVFormat, calibration: Calibration | None = None):
        if fmt.calibrated and calibration is None:
            raise KVChatError(f"{fmt.name} needs a calibration of the model; run: kvchat calibrate")
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None):
            raise ModelRefused(
                f"{config.model_type} keeps latent keys and values (MLA), which kvchat cannot pack yet"
            )
        decoder = model.get_decoder()
        layers = []
        ropes: dict[tuple[str, int], Rope] = {}  # shared, for their tables
        kinds = zip(decoder.layers, *get_layer_types_and_kwargs(config), strict=True)
        for i, (layer, kind, settings) in enumerate(kinds):
            if kind == "sliding_attention":
                layers.append(DynamicSlidingWindowLayer(**settings))
            elif kind == "full_attention":
                attention = layer.self_attn
                rotated = fmt.pre_rope and getattr(attention, "use_rope", True)
                rope = None
                if rotated:
                    key = (kind, attention.head_dim)
                    if key not in ropes:
                        ropes[key] = Rope(decoder.rotary_emb, attention, kind)
                    rope = ropes[key]
                ranges = calibration.ranges(i, fmt, model.device) if calibration else (None, None)
                layers.append(PackedLayer(fmt, rope, ranges))
            else:
                raise ModelRefused(
                    f"{config.model_type} has a layer of type {kind!r}; kvchat serves full and sliding attention"
                )
        super().__init__(layers=layers)
        self.fmt, self.device = fmt, model.device

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

    def close(self) -> None:
        """Pack the window as well: what follows then depends on packed blocks (and dense sliding layers) alone.

        Where every token is packed, no format's block is left half full: `Engine.ends`.
        """
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.flush(window=0)

    def part(self, start: int) -> dict[str, Tensor]:
        """The state that came after `start` tokens, where the cache was closed (or empty), as tensors to store."""
        return {
            f"{i}.{name}": tensor.contiguous()
            for i, layer in enumerate(self.layers)
            for name, tensor in (
                layer.part(start) if isinstance(layer, PackedLayer) else _sliding_part(layer)
            ).items()
        }

    def adopt(self, part: Mapping[str, Tensor]) -> None:
        """Append what `part` returned, copying it."""
        for i, layer in enumerate(self.layers):
            prefix = f"{i}."
            own = {
                name.removeprefix(prefix): tensor.to(self.device)
                for name, tensor in part.items()
                if name.startswith(prefix)
            }
            if isinstance(layer, PackedLayer):
                layer.adopt(own)
            else:
                _adopt_sliding(layer, own)

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


def _sliding_part(layer: DynamicSlidingWindowLayer) -> dict[str, Tensor]:
    assert layer.keys is not None and layer.values is not None
    return {
        "keys": layer.keys,
        "values": layer.values,
        "tokens": torch.tensor([layer.cumulative_length]),
    }


def _adopt_sliding(layer: DynamicSlidingWindowLayer, part: Mapping[str, Tensor]) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(part["keys"], part["values"])
    layer.keys, layer.values = (part[what].clone() for what in ("keys", "values"))
    layer.cumulative_length = int(part["tokens"])
