"""`attend`: attention straight over packed keys and values: by a kernel that reads codes, or one tile at a time.

transformers calls it in place of its own attention functions (`AttentionInterface`). No mask function is registered for
its name, so no [queries, keys] mask of the history is ever built: causality and windows are decided here.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvchat.errors import KVChatError
from kvchat.kv import ops
from kvchat.kv.layer import PackedLayer
from kvchat.kv.step import StepLayer

NAME = "kvchat"

LONG = 128
"""Tokens from which a chunk goes to the kernel over packed rows on a CPU. Shorter ones are questions: their answer's first token
would wait for numba's import longer than the kernel saves. Single tokens go there too."""


GPU_ROWS = 64
"""Rows (queries times query heads of a key head) up to which a GPU reads codes; for more it dequantizes a tile for all of them."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: PackedLayer | StepLayer | Tensor,
    value: PackedLayer | StepLayer | Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The queries [1, Hq, T, D] are the T newest tokens; returns [1, T, Hq, D] and no weights.

    `key` and `value` are the layer itself (see `PackedLayer.update`), or dense tensors [1, Hkv, S, D] in a sliding layer.
    """
    if query.shape[0] != 1 or attention_mask is not None:
        raise KVChatError("kvchat attends for one unpadded sequence; use one cache a sequence")
    q = query[0]
    if isinstance(key, PackedLayer):
        key.observe(q)
        output = _over_layer(q, key, scaling, softcap)
    elif isinstance(key, StepLayer):
        output = key.attend(q, scaling, softcap)
    else:
        assert isinstance(value, Tensor)
        output, _lse = ops.attention(
            q, key[0], value[0], scaling, causal=True, window=sliding_window, softcap=softcap
        )
    return output.to(query.dtype).transpose(0, 1)[None].contiguous(), None


def _over_layer(query: Tensor, layer: PackedLayer, scaling: float, softcap: float | None) -> Tensor:
    """Attention of the newest tokens [Hq, T, D] over a whole layer, pieces merged by LSE; [Hq, T, D] float32.

    Packed rows go to a kernel as they are (see `LONG`), or tile by tile where there is none.
    """
    count = query.shape[1]
    first = layer.get_seq_length() - count
    state = None
    packed = layer.packed() if _reads_codes(query, layer) else None
    if packed is not None:
        state = ops.attention_packed(query, *packed[:2], scaling, rope=packed[2], softcap=softcap)
    for start, keys, values in layer.tiles(packed is None):
        past = min(first - start, keys.shape[1]) if count > 1 else keys.shape[1]
        if past > 0:
            part = ops.attention(query, keys[:, :past], values[:, :past], scaling, softcap=softcap)
            state = ops.merge(state, part)
        if past < keys.shape[1]:
            # the chunk itself: the only keys that a query may have to be kept from
            part = ops.attention(
                query, keys[:, past:], values[:, past:], scaling, causal=True, softcap=softcap
            )
            state = ops.merge(state, part)
    assert state is not None
    return state[0]


def _reads_codes(query: Tensor, layer: PackedLayer) -> bool:
    """Whether so many queries are faster by a kernel over packed rows than by a dense one over tiles."""
    heads, count, _ = query.shape
    if query.is_cuda:
        assert layer.keys is not None
        return heads // layer.keys.shape[1] * count <= GPU_ROWS
    return count == 1 or count >= LONG


def register() -> None:
    """Make `attn_implementation="kvchat"` known to transformers."""
    AttentionInterface.register(NAME, attend)
