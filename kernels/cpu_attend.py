"""`reference.attention_packed` on the CPU, by loops that numba compiles. Outputs and LSE are float32.

The history is cut into splits of a fixed number of tokens, whose attention is computed apart (a thread takes some heads and
splits) and merged by LSE. The cuts depend on nothing but the number of tokens, so the result does not depend on the number of
threads. In a split, blocks of tokens are unpacked into a buffer that stays in the L1 cache and serves all query heads that
share the key head. Many queries at once go to torch's matrix products instead, over tiles that are dequantized once.

`cpu_loops` says how the loops are written.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from kvchat_kernels import torch_attend
from kvchat_kernels.cpu_loops import BLOCK, SPLIT, Rows, kernels
from kvchat_kernels.reference import Packed
from torch import Tensor

TILE = 2048
"""Tokens dequantized at once for torch's matrix products."""

FEW_ROWS = 64
"""Rows (queries times query heads of a key head) up to which the loops are faster than dequantizing for torch."""

_threads = ThreadPoolExecutor(thread_name_prefix="attention")


def attention_packed(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    if key.axis != "channel" or value.axis != "token" or key.group % BLOCK:
        raise ValueError("keys go by channel in groups of whole blocks, values by token")
    heads, count, dim = query.shape
    kv_heads, tokens, _ = key.codes.shape
    attend, stage, join = kernels(dim, key.bits, value.bits, value.group)
    keys, values = _rows(key), _rows(value)
    none = np.empty((0, dim), np.float32)
    cos, sin = (none, none) if rope is None else (t.float().contiguous().numpy() for t in rope)
    rows = heads // kv_heads * count
    if rows <= FEW_ROWS:
        folded = (query.float() * scaling).reshape(kv_heads, rows, dim).contiguous().numpy()
        splits = -(-tokens // SPLIT)
        outputs = np.empty((kv_heads, splits, rows, dim), np.float32)
        lses = np.empty((kv_heads, splits, rows), np.float32)
        cap = np.float32(softcap or 0)
        _shared(
            attend, kv_heads * splits, folded, keys, key.group, values, tokens, cos, sin, cap, outputs, lses
        )
        output, lse = join(outputs, lses)
        return torch.from_numpy(output).reshape(query.shape), torch.from_numpy(lse).reshape(heads, count)
    state = None
    buffer = torch.empty(
        2 * kv_heads * min(TILE, tokens) * dim
    )  # one for all tiles: fresh memory costs page faults
    for first in range(0, tokens, TILE):
        length = min(TILE, tokens - first)
        k, v = buffer[: 2 * kv_heads * length * dim].view(2, kv_heads, length, dim)
        _shared(
            stage, kv_heads * length // BLOCK, keys, key.group, values, first, cos, sin, k.numpy(), v.numpy()
        )
        part = torch_attend.attention(query, k, v, scaling, softcap=softcap)
        state = torch_attend.merge(state, part)
    assert state is not None
    return state


def _rows(packed: Packed) -> Rows:
    """Packed rows of all heads as flat arrays, from the first element in use to the last."""
    arrays, strides = [], []
    for part in (packed.codes, packed.scale.view(torch.uint16), packed.zero.view(torch.uint16)):
        heads, rows, width = part.shape
        if part.stride()[1:] != (width, 1):
            part = part.contiguous()
        arrays.append(part.as_strided(((heads - 1) * part.stride(0) + rows * width,), (1,)).numpy())
        strides.append(part.stride(0))
    return Rows(*arrays, *strides)


def _shared(loop: Any, jobs: int, *args: Any) -> None:
    """Run `loop(first, end, *args)` over all jobs, in as many threads as torch uses."""
    threads = min(torch.get_num_threads(), jobs)
    cuts = [jobs * i // threads for i in range(threads + 1)]
    others = [_threads.submit(loop, a, b, *args) for a, b in zip(cuts[1:], cuts[2:], strict=False)]
    loop(0, cuts[1], *args)
    for other in others:
        other.result()
