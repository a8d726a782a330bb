"""`DecodeStep`: one token's way through the model, captured once as a CUDA graph and replayed, with no Python in between.

What a captured step touches must not move, and what changes from step to step must lie on the device. So sink and window of a
layer share a buffer for as long as step follows step, and the position and the counts lie in one small tensor. Blocks are
packed between steps, by the layer itself: its state is what it would be without a graph.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvchat.kv import ops
from kvchat.kv.cache import KVCache
from kvchat.kv.layer import PackedLayer
from kvchat.kv.rope import LENGTH_DEPENDENT


class StepLayer(CacheLayerMixin):
    """A `PackedLayer` whose sink and window lie in `keys` and `values`, [1, heads, sink + window + block, head_dim]."""

    is_sliding = False
    is_compileable = True

    def __init__(self, own: PackedLayer, state: Tensor, room: int):
        super().__init__()
        own.flush()  # the chunk that was read last is still whole in the window
        assert own.keys is not None
        self.own, self.state = own, state
        _, heads, _, head_dim = own.keys.shape
        capacity = own.sink[0].shape[2] + own.fmt.window + own.fmt.block
        self.keys, self.values = (own.keys.new_empty(1, heads, capacity, head_dim) for _ in range(2))
        self._packed = own.packed(capacity + room)
        self.is_initialized = True
        self._hold()

    def _hold(self) -> None:
        """Copy sink and window to where steps expect them."""
        own = self.own
        for buffer, sink, window in zip(
            (self.keys, self.values), own.sink, (own.keys, own.values), strict=True
        ):
            assert buffer is not None and window is not None
            buffer[:, :, : sink.shape[2]] = sink
            buffer[:, :, sink.shape[2] : sink.shape[2] + window.shape[2]] = window

    @property
    def dense_tokens(self) -> int:
        assert self.own.keys is not None
        return self.own.sink[0].shape[2] + self.own.keys.shape[2]

    def flush(self) -> None:
        """Pack what has fallen out of the window, before a step."""
        before = self.own.packed_tokens
        self.own.flush()
        if self.own.packed_tokens != before:
            self._hold()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a step layer begins with a packed layer's state")

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> "tuple[StepLayer, StepLayer]":
        assert self.keys is not None and self.values is not None
        slot = self.state[2:3]
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        return self, self

    def attend(self, query: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Of the newest token's queries [Hq, 1, D]; [Hq, 1, D] float32."""
        assert self.keys is not None and self.values is not None and self._packed is not None
        keys, values, rope = self._packed
        dense = self.keys[0], self.values[0]
        return ops.attention_step(
            query, keys, values, dense, self.state[3:], scaling, rope=rope, softcap=softcap
        )

    def append(self) -> None:
        """After a step: the packed layer's window is one token longer, a view of the buffer."""
        assert self.keys is not None and self.values is not None
        first, end = self.own.sink[0].shape[2], self.dense_tokens + 1
        self.own.keys, self.own.values = self.keys[:, :, first:end], self.values[:, :, first:end]
        self.own.next_position += 1

    def get_seq_length(self) -> int:
        return self.own.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.own.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1


def serves(model: Any, cache: KVCache) -> bool:
    """Whether a step can be captured: on CUDA, with a kernel for every layer, and nothing that asks the host on the way."""
    config = model.config.get_text_config(decoder=True)
    if cache.device.type != "cuda" or getattr(config, "num_experts", None):
        return False
    if getattr(model.get_decoder().rotary_emb, "rope_type", "") in LENGTH_DEPENDENT:
        return False
    return all(
        isinstance(layer, PackedLayer) and layer.packed_tokens >= FEWEST and layer.packed() is not None
        for layer in cache.layers
    )


FEWEST = 64
"""Packed tokens from which steps are captured: a kernel's longest tile."""


class DecodeStep:
    """Reads one token after another into `cache`, at most `room` of them, and returns logits [1, vocabulary]."""

    def __init__(self, model: Any, cache: KVCache, room: int):
        self._model, self._room = model, room
        # token, position, where its keys and values go, packed tokens, dense tokens
        self._state = torch.zeros(5, dtype=torch.int64, device=cache.device)
        self._layers = []
        for layer in cache.layers:
            assert isinstance(layer, PackedLayer)
            self._layers.append(StepLayer(layer, self._state, room))
        self._cache = Cache(layers=list(self._layers))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def __call__(self, token: int) -> Tensor:
        for layer in self._layers:
            layer.flush()
        own, dense = self._layers[0].own, self._layers[0].dense_tokens
        self._state.copy_(torch.tensor([token, own.next_position, dense, own.packed_tokens, dense + 1]))
        if self._graph is not None:
            self._graph.replay()
        elif self._steps == 0 or self._state.device.type != "cuda":
            self._logits = self._forward()  # not captured: kernels are compiled and loaded now
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()
            self._graph.replay()
        self._steps += 1
        for layer in self._layers:
            layer.append()
        return self._logits

    def _forward(self) -> Tensor:
        return self._model(
            self._state[None, :1],
            position_ids=self._state[None, 1:2],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[0]
