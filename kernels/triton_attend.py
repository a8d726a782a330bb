"""`reference.attention_packed` on a GPU: split-KV flash-decoding that reads packed codes and nothing else.

One program takes a run of tokens (a split) of one key head for up to 64 query rows; the rows are the queries of all the
query heads that share the key head, so keys and values are read once for all of them. A second kernel joins the splits.

What keeps the work an element small, since at 2 bits the arithmetic is the limit and not the bandwidth:

- A masked field of a byte, put in a float16 as it lies there, is the subnormal number code * 2**(shift - 24), which tensor
  cores take as it is. One AND unpacks; no shift and no conversion. Powers of two are folded into scales.
- A field holds consecutive channels, so keys are a sum of 2 or 4 products, each with a run of the query's channels.
- A key channel's scale is the same for a group of tokens: it is multiplied into the query, once a tile, and the zeros give
  one number a query row. A token's value scale is multiplied into its weight, and the zeros are a product of their own.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from kvchat_kernels.reference import Packed
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
KEY_SHIFT = tl.constexpr(2)
"""Folded queries are multiplied by 2**KEY_SHIFT, so that few of them are subnormal."""
WEIGHT_SHIFT = tl.constexpr(4)
"""Softmax weights are at most 2**WEIGHT_SHIFT in float16, for the same reason."""


class Plan(NamedTuple):
    """How one call is cut: query rows and tokens of a program's tile, tokens a split, and Triton's own settings."""

    block_m: int
    block_n: int
    split: int
    warps: int
    stages: int


def plan(bits: int, head_dim: int, rows: int, length: int, group: int, kv_heads: int, processors: int) -> Plan:
    """The cut for `length` tokens and `rows` query rows a key head on a GPU of `processors` SMs; found by benchmarks/gpu.py.

    A tile lies within one group of tokens, so that one scaled query serves it.
    """
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_n = min(group, 32 if block_m > 16 or head_dim > 128 else 64)
    warps = 1 if block_m == 16 else 4
    programs = kv_heads * math.ceil(rows / block_m)
    splits = max(1, min(256, processors * 12 // warps // programs, length // 512))
    split = math.ceil(length / splits / block_n) * block_n
    return Plan(block_m, block_n, split, warps, 3)


@triton.jit
def _bytes(codes, rows, j, inside, N: tl.constexpr, BITS: tl.constexpr):
    """Bytes `j` of rows at `rows`, as int16: of the plane of 2 or 4 bits, and of the third bits moved left of it."""
    low = tl.load(codes + (rows + j), mask=inside, other=0).to(tl.int16)
    if BITS == 3:
        half: tl.constexpr = N // 2
        third = tl.load(codes + (rows + N + j % half), mask=inside, other=0).to(tl.int16)
        return low, third << (2 - j // half).to(tl.int16)
    else:
        return low, low


@triton.jit
def _field(low, third, f: tl.constexpr, BITS: tl.constexpr):
    """Codes of field `f`, each times 2**(width * f - 24), as float16."""
    if BITS == 4:
        x = low & (15 << (4 * f))
    elif BITS == 2:
        x = low & (3 << (2 * f))
    else:
        x = (low & (3 << (2 * f))) | (third & (4 << (2 * f)))
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _attend(
    q_ptr,
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    v_zero,
    cos,
    sin,
    out,
    lse,
    q_head,
    q_token,
    k_head,
    k_row,
    ks_head,
    ks_row,
    kz_head,
    kz_row,
    v_head,
    v_row,
    vs_head,
    vs_row,
    vz_head,
    vz_row,
    rope_row,
    count,
    share,
    length,
    split,
    scaling,
    softcap,
    D: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_COLUMNS: tl.constexpr,
):
    K_W: tl.constexpr = 4 if K_BITS == 4 else 2  # bits of a field
    V_W: tl.constexpr = 4 if V_BITS == 4 else 2
    K_FIELDS: tl.constexpr = 8 // K_W
    V_FIELDS: tl.constexpr = 8 // V_W
    K_N: tl.constexpr = D // K_FIELDS  # bytes of a plane, channels of a field
    V_N: tl.constexpr = D // V_FIELDS
    V_BLOCKS: tl.constexpr = V_N // V_WIDTH
    V_GROUPS: tl.constexpr = (D + V_GROUP - 1) // V_GROUP

    part, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = rows < share * count
    q_heads = head * share + rows // count
    q_row = q_ptr + q_heads * q_head + (rows % count).to(tl.int64) * q_token

    # query rows in units of a power of two that lets float16 hold them times any scale
    jk = tl.arange(0, K_COLUMNS)
    in_k = jk < K_N
    top = tl.full([BLOCK_M], 1e-30, tl.float32)
    for f in tl.static_range(K_FIELDS):
        raw = tl.load(q_row[:, None] + (f * K_N + jk)[None, :], mask=present[:, None] & in_k[None, :], other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(raw.to(tl.float32)), 1))
    unit = tl.exp2(tl.ceil(tl.log2(top)) - 2)
    q = ()
    for f in tl.static_range(K_FIELDS):
        raw = tl.load(q_row[:, None] + (f * K_N + jk)[None, :], mask=present[:, None] & in_k[None, :], other=0.0)
        q = q + ((raw.to(tl.float32) / unit[:, None]).to(tl.float16),)
    factor = unit * scaling

    jv = tl.arange(0, V_COLUMNS)
    in_v = jv < V_WIDTH
    g8 = tl.arange(0, 8)
    tokens = tl.arange(0, BLOCK_N)
    acc = ()
    for _r in tl.static_range(V_BLOCKS * V_FIELDS):
        acc = acc + (tl.zeros([BLOCK_M, V_COLUMNS], tl.float32),)
    zacc = tl.zeros([BLOCK_M, 8], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    k_codes += head * k_head
    k_scale += head * ks_head
    k_zero += head * kz_head
    v_codes += head * v_head
    v_scale += head * vs_head
    v_zero += head * vz_head
    begin = part.to(tl.int64) * split
    for step in range(0, tl.minimum(length - begin, split).to(tl.int32), BLOCK_N):
        at = begin + step
        group = at // K_GROUP
        low, third = _bytes(
            k_codes + at * k_row, (tokens * k_row)[None, :], jk[:, None], in_k[:, None], K_N, K_BITS
        )
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if ROPE:
            angle = (at + tokens)[None, :] * rope_row + jk[:, None]
            for f in tl.static_range(K_FIELDS // 2):
                first = _dequantize(low, third, f, group, k_scale, ks_row, k_zero, kz_row, jk, in_k, K_N, K_W, K_BITS)
                second = _dequantize(
                    low, third, f + K_FIELDS // 2, group, k_scale, ks_row, k_zero, kz_row, jk, in_k, K_N, K_W, K_BITS
                )
                a, b = angle + f * K_N, angle + (f * K_N + D // 2)
                turned = first * tl.load(cos + a, mask=in_k[:, None], other=0.0)
                turned -= second * tl.load(sin + a, mask=in_k[:, None], other=0.0)
                scores = tl.dot(q[f], turned.to(tl.float16), scores)
                turned = second * tl.load(cos + b, mask=in_k[:, None], other=0.0)
                turned += first * tl.load(sin + b, mask=in_k[:, None], other=0.0)
                scores = tl.dot(q[f + K_FIELDS // 2], turned.to(tl.float16), scores)
            scores *= factor[:, None]
        else:
            shift = tl.zeros([BLOCK_M, 8], tl.float32)
            for f in tl.static_range(K_FIELDS):
                c = f * K_N + jk
                scale = tl.load(k_scale + group * ks_row + c, mask=in_k, other=0.0)
                zero = tl.load(k_zero + group * kz_row + c, mask=in_k, other=0.0)
                folded = q[f] * (scale * 2.0 ** (KEY_SHIFT - K_W * f)).to(tl.float16)[None, :]
                scores = tl.dot(folded, _field(low, third, f, K_BITS), scores)
                # eight equal columns: a tensor core is quicker than a sum across lanes
                shift = tl.dot(q[f], tl.broadcast_to(zero[:, None], [K_COLUMNS, 8]), shift)
            scores = scores * (factor * 2.0 ** (24 - KEY_SHIFT))[:, None] + (tl.max(shift, 1) * factor)[:, None]
        if SOFTCAP:
            scores = softcap - 2 * softcap / (1 + tl.exp2(scores))  # tanh

        new = tl.maximum(high, tl.max(scores, 1))
        fade = tl.exp2(high - new)
        high = new
        p = tl.exp2(scores - (new - WEIGHT_SHIFT)[:, None])
        total = total * fade + tl.sum(p, 1)
        zeros = tl.load(
            v_zero + (at + tokens)[:, None] * vz_row + g8[None, :], mask=g8[None, :] < V_GROUPS, other=0.0
        )
        zacc = tl.dot(p.to(tl.float16), zeros, zacc * fade[:, None])
        weights = ()
        for g in tl.static_range(V_GROUPS):
            scale = tl.load(v_scale + (at + tokens) * vs_row + g).to(tl.float32)
            weights = weights + ((p * tl.minimum(scale, 4094.0)[None, :]).to(tl.float16),)
        fresh = ()
        for b in tl.static_range(V_BLOCKS):
            low, third = _bytes(
                v_codes + at * v_row, (tokens * v_row)[:, None], (b * V_WIDTH + jv)[None, :], in_v[None, :], V_N, V_BITS
            )
            for f in tl.static_range(V_FIELDS):
                x = _field(low, third, f, V_BITS)
                a = acc[b * V_FIELDS + f] * fade[:, None]
                fresh = fresh + (_weigh(a, weights, x, jv, f * V_N + b * V_WIDTH, V_WIDTH, V_GROUP),)
        acc = fresh

    parts = tl.num_programs(0)
    place = (q_heads * count + rows % count) * parts + part
    for b in tl.static_range(V_BLOCKS):
        for f in tl.static_range(V_FIELDS):
            c = f * V_N + b * V_WIDTH + jv
            a = acc[b * V_FIELDS + f] * 2.0 ** (24 - V_W * f)
            for g in tl.static_range(V_GROUPS):
                zero = tl.sum(tl.where(g8[None, :] == g, zacc, 0.0), 1)
                a += tl.where((c // V_GROUP == g)[None, :], zero[:, None], 0.0)
            inside = present[:, None] & in_v[None, :]
            tl.store(out + place[:, None] * D + c[None, :], a / total[:, None], mask=inside)
    tl.store(lse + place, (high + tl.log2(total) - WEIGHT_SHIFT) / LOG2E, mask=present)


@triton.jit
def _weigh(acc, weights, x, jv, C0: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Add to `acc` the tokens' codes `x` of channels C0 .. C0 + WIDTH, weighted for the group that each channel is in."""
    if C0 // GROUP == (C0 + WIDTH - 1) // GROUP:
        acc = tl.dot(weights[C0 // GROUP], x, acc)
    else:
        for g in tl.static_range(C0 // GROUP, (C0 + WIDTH - 1) // GROUP + 1):
            acc = tl.dot(weights[g], tl.where(((C0 + jv) // GROUP == g)[None, :], x, 0.0), acc)
    return acc


@triton.jit
def _dequantize(
    low, third, f: tl.constexpr, group, k_scale, ks_row, k_zero, kz_row, jk, in_k,
    K_N: tl.constexpr, K_W: tl.constexpr, K_BITS: tl.constexpr,
):  # fmt: skip
    """Keys of field `f`, [channels, tokens] float32."""
    c = f * K_N + jk
    scale = tl.load(k_scale + group * ks_row + c, mask=in_k, other=0.0).to(tl.float32) * 2.0 ** (24 - K_W * f)
    zero = tl.load(k_zero + group * kz_row + c, mask=in_k, other=0.0).to(tl.float32)
    return _field(low, third, f, K_BITS).to(tl.float32) * scale[:, None] + zero[:, None]


@triton.jit
def _join(parts_out, parts_lse, out, lse, parts, D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """One query row: its splits' outputs, weighted by exp(LSE)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    high = -float("inf")
    for start in range(0, parts, BLOCK):
        s = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.max(tl.load(parts_lse + row * parts + s, mask=s < parts, other=-float("inf")), 0))
    acc = tl.zeros([COLUMNS], tl.float32)
    total = 0.0
    for start in range(0, parts, BLOCK):
        s = start + tl.arange(0, BLOCK)
        weight = tl.exp(tl.load(parts_lse + row * parts + s, mask=s < parts, other=-float("inf")) - high)
        total += tl.sum(weight, 0)
        piece = tl.load(
            parts_out + (row * parts + s)[:, None] * D + c[None, :],
            mask=(s < parts)[:, None] & (c < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(piece * weight[:, None], 0)
    tl.store(out + row * D + c, acc / total, mask=c < D)
    tl.store(lse + row, high + tl.log(total))


def attention_packed(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    heads, count, dim = query.shape
    kv_heads, length, _ = key.codes.shape
    share = heads // kv_heads
    if cut is None:
        processors = (
            torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
        )
        cut = plan(max(key.bits, value.bits), dim, share * count, length, key.group, kv_heads, processors)
    v_n = dim * (4 if value.bits == 4 else 2) // 8
    v_width = value.group if v_n > value.group and v_n % value.group == 0 else v_n
    parts = math.ceil(length / cut.split)
    new: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    out, lse = torch.empty(heads, count, parts, dim, **new), torch.empty(heads, count, parts, **new)
    cos, sin = rope if rope is not None else (query, query)
    log2e = math.log2(math.e)
    scaling, softcap_ = (scaling * log2e, 0.0) if softcap is None else (2 * scaling * log2e / softcap, softcap * log2e)
    _attend[(parts, math.ceil(share * count / cut.block_m), kv_heads)](
        query, key.codes, key.scale, key.zero, value.codes, value.scale, value.zero, cos, sin, out, lse,
        *query.stride()[:2], *key.codes.stride()[:2], *key.scale.stride()[:2], *key.zero.stride()[:2],
        *value.codes.stride()[:2], *value.scale.stride()[:2], *value.zero.stride()[:2], cos.stride(0),
        count, share, length, cut.split, scaling, softcap_,
        D=dim, K_BITS=key.bits, V_BITS=value.bits, K_GROUP=key.group, V_GROUP=value.group,
        ROPE=rope is not None, SOFTCAP=softcap is not None, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n,
        K_COLUMNS=triton.next_power_of_2(max(16, dim * (4 if key.bits == 4 else 2) // 8)),
        V_WIDTH=v_width, V_COLUMNS=triton.next_power_of_2(max(16, v_width)),
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if parts == 1:
        return out[:, :, 0], lse[:, :, 0]
    joined, joined_lse = torch.empty(heads, count, dim, **new), torch.empty(heads, count, **new)
    columns = triton.next_power_of_2(dim)
    _join[(heads * count,)](out, lse, joined, joined_lse, parts, D=dim, COLUMNS=columns, BLOCK=16, num_warps=4)
    return joined, joined_lse
