"""`reference.attention_step` on a GPU: three launches a layer, whose shapes and addresses don't depend on the tokens there are."""

import triton
import triton.language as tl
from kvchat_kernels.reference import Packed
from kvchat_kernels.triton_attend import in_exponents_of_2, join, over_splits
from torch import Tensor

BLOCK_N = 64
"""Dense tokens a tile: a window is a few of them."""


@triton.jit
def _dense(
    q_ptr, k_ptr, v_ptr, counts, out, lse, q_head, k_head, v_head, share, pieces, scaling, softcap,
    D: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head over its dense tokens; the result is the last piece."""
    head = tl.program_id(0)
    rows, c = tl.arange(0, BLOCK_M), tl.arange(0, COLUMNS)
    present = rows < share
    heads = head * share + rows
    inside = (c < D)[None, :]
    count = tl.load(counts + 1).to(tl.int32)
    q = tl.load(q_ptr + heads[:, None] * q_head + c[None, :], mask=present[:, None] & inside, other=0.0)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(0, count, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        there = (t < count)[:, None] & inside
        k = tl.load(k_ptr + head * k_head + t[:, None] * D + c[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + head * v_head + t[:, None] * D + c[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if SOFTCAP:
            scores = softcap - 2 * softcap / (1 + tl.exp2(scores))  # tanh
        scores = tl.where((t < count)[None, :], scores, -float("inf"))
        new = tl.maximum(high, tl.max(scores, 1))
        fade = tl.exp2(high - new)
        p = tl.exp2(scores - new[:, None])
        high = new
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    place = heads * pieces + pieces - 1
    tl.store(out + place[:, None] * D + c[None, :], acc / total[:, None], mask=present[:, None] & inside)
    tl.store(lse + place, (high + tl.log2(total)) / 1.4426950408889634, mask=present)


def attention_step(
    query: Tensor,
    key: Packed,
    value: Packed,
    dense: tuple[Tensor, Tensor],
    counts: Tensor,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> Tensor:
    out, lse = over_splits(query, key, value, scaling, rope, softcap, counts, further=1)
    k, v = dense
    kv_heads, _, dim = k.shape
    share = query.shape[0] // kv_heads
    scaling, softcap_ = in_exponents_of_2(scaling, softcap)
    _dense[(kv_heads,)](
        query, k, v, counts, out, lse, query.stride(0), k.stride(0), v.stride(0), share, out.shape[2],
        scaling, softcap_,
        D=dim, SOFTCAP=softcap is not None, BLOCK_M=max(16, triton.next_power_of_2(share)), BLOCK_N=BLOCK_N,
        COLUMNS=triton.next_power_of_2(dim),
    )  # fmt: skip
    return join(out, lse)[0]
