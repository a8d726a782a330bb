"""`reference.attention_packed` on a GPU: split-KV flash-decoding that reads packed codes and nothing else.

One program takes a run of tokens (a split) of one key head for up to 64 query rows; the rows are the queries of all the
query heads that share the key head, so keys and values are read once for all of them. A second kernel joins the splits.

What keeps the work an element small, since at 2 bits the arithmetic is the limit and not the bandwidth:

- Codes become float16 by one AND a pair, see `triton_unpack`.
- A field holds consecutive channels, so keys are a sum of 2 or 4 products, each with a run of the query's channels.
- A key channel's scale is the same for a group of tokens: it is multiplied into the query, once a tile, and the zeros give
  one number a query row. A token's value scale is multiplied into its weight, and the zeros are a product of their own.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from kvchat_kernels.reference import Packed
from kvchat_kernels.triton_unpack import fields, half, read, words
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
KEY_SHIFT = tl.constexpr(2)
"""Folded queries are multiplied by 2**KEY_SHIFT, so that few of them are subnormal."""
SLACK = tl.constexpr(4)
"""Softmax weights are at most 2**WEIGHT_SHIFT in float16, for the same reason."""


class Plan(NamedTuple):
    """How one call is cut: query rows and tokens of a tile, tokens a split (a multiple of both the tile and the keys'
    group), and Triton's own settings; `registers` is a thread's limit."""

    block_m: int
    block_n: int
    split: int
    warps: int
    stages: int
    registers: int | None = None


def plan(
    head_dim: int, rows: int, length: int, group: int, kv_heads: int, processors: int, rope: bool = False
) -> Plan:
    """The cut for `length` tokens and `rows` query rows a key head, on `processors` SMs; found by benchmarks/gpu.py.

    One warp for 16 rows: more of them would each unpack every code. What counts is many programs an SM.
    """
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_n = 64 if head_dim == 64 or group > 32 and head_dim <= 128 else 32
    if rope or block_m > 16 or length < block_n:
        block_n = min(block_n, 32)
    programs = kv_heads * math.ceil(rows / block_m)
    warps = block_m // 16
    splits = max(1, min(processors * PROGRAMS // warps // programs, length // SHORTEST))
    unit = max(block_n, group)
    split = math.ceil(length / splits / unit) * unit
    # twelve warps an SM instead of eight, for a few numbers that are put aside
    registers = 168 if head_dim <= 128 else None
    stages = 1 if rope else 3  # tables of angles would fill the shared memory
    return Plan(block_m, block_n, split, warps, stages, registers)


PROGRAMS = 12
"""Programs of one warp an SM: as many as its registers hold, so that all run at once and end together."""
SHORTEST = 128
"""Tokens of the shortest split."""


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
    ks_head,
    ks_row,
    kz_head,
    kz_row,
    v_head,
    vs_head,
    vz_head,
    rope_row,
    count,
    share,
    length,
    counts,
    pieces,
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
    K_ROW: tl.constexpr,
    VS_ROW: tl.constexpr,
    VZ_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_HALVES: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    Z_COLUMNS: tl.constexpr,
    IN_PTX: tl.constexpr,
    COUNTED: tl.constexpr,
):
    if COUNTED:
        length = tl.load(counts)
    K_W: tl.constexpr = 4 if K_BITS == 4 else 2  # bits of a field
    V_W: tl.constexpr = 4 if V_BITS == 4 else 2
    K_FIELDS: tl.constexpr = 8 // K_W
    V_FIELDS: tl.constexpr = 8 // V_W
    K_N: tl.constexpr = D // K_FIELDS  # bytes of a plane, channels of a field
    V_N: tl.constexpr = D // V_FIELDS
    K_WORDS: tl.constexpr = K_N // K_HALVES  # columns of a product
    V_BLOCKS: tl.constexpr = V_N // V_WIDTH
    V_GROUPS: tl.constexpr = (D + V_GROUP - 1) // V_GROUP

    part, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = rows < share * count
    q_heads = head * share + rows // count
    q_row = q_ptr + q_heads * q_head + (rows % count).to(tl.int64) * q_token

    # query rows in units of a power of two that lets float16 hold them times any scale
    jk = tl.arange(0, K_COLUMNS)
    word = jk % (K_N // 2)
    in_k = jk < K_WORDS
    K_ALL: tl.constexpr = K_COLUMNS == K_WORDS
    q_channel = 2 * word + jk // (K_N // 2)  # of the first field
    in_q = present[:, None] & in_k[None, :]
    top = tl.full([BLOCK_M], 1e-30, tl.float32)
    for r in tl.static_range(K_FIELDS * K_HALVES):
        c = q_channel + (r % K_FIELDS * K_N + r // K_FIELDS)
        raw = tl.load(q_row[:, None] + c[None, :], mask=in_q, other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(raw.to(tl.float32)), 1))
    unit = tl.exp2(tl.ceil(tl.log2(top)) - 2)
    one = (jk[:, None] == jk[None, :]).to(tl.float16)
    q = ()
    for r in tl.static_range(K_FIELDS * K_HALVES):
        c = q_channel + (r % K_FIELDS * K_N + r // K_FIELDS)
        raw = tl.load(q_row[:, None] + c[None, :], mask=in_q, other=0.0)
        # times one: a product's result lies in registers just as the next product wants it
        q = q + (tl.dot((raw.to(tl.float32) / unit[:, None]).to(tl.float16), one).to(tl.float16),)
    factor = unit * scaling

    jv = tl.arange(0, V_COLUMNS)
    in_v = jv < V_WIDTH // 2
    zg = tl.arange(0, Z_COLUMNS)
    tokens = tl.arange(0, BLOCK_N)
    acc = ()
    for _r in tl.static_range(2 * V_BLOCKS * V_FIELDS):
        acc = acc + (tl.zeros([BLOCK_M, V_COLUMNS], tl.float32),)
    zacc = tl.zeros([BLOCK_M, Z_COLUMNS], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    k_second = tl.where(word < K_N // 4, 0, -1).to(tl.int16)[:, None]
    V_ALL: tl.constexpr = V_COLUMNS * 2 == V_WIDTH
    k_up = (8 * (jk // (K_N // 2))).to(tl.int16)
    limit = tl.full([BLOCK_N], 4094.0, tl.float16)

    k_codes += head * k_head
    k_scale += head * ks_head
    k_zero += head * kz_head
    v_codes += head * v_head
    v_scale += head * vs_head
    v_zero += head * vz_head
    begin = part.to(tl.int64) * split
    end = tl.minimum(begin + split, length)
    for step in range(0, (end - begin).to(tl.int32), BLOCK_N):
        at = begin + step
        if BLOCK_N > K_GROUP:  # a last tile may be short: it begins earlier, and hides what came before
            at = tl.multiple_of(tl.minimum(at, end - BLOCK_N), 32)
        k_here = k_codes + at * K_ROW + (tokens * K_ROW)[None, :]
        low, third = words(k_here, word[:, None], in_k[:, None], k_second, K_N, K_BITS, K_ALL, IN_PTX)
        if K_HALVES == 1:
            low, third = low >> k_up[:, None], third >> k_up[:, None]
        codes = fields(low, third, 0, K_BITS, IN_PTX)
        if K_HALVES == 2:
            codes = codes + fields(low, third, 1, K_BITS, IN_PTX)
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for g in tl.static_range(0 if ROPE else (BLOCK_N + K_GROUP - 1) // K_GROUP):
            row = at // K_GROUP + g
            own = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            shift = tl.zeros([BLOCK_M, 8], tl.float32)
            for r in tl.static_range(K_HALVES * K_FIELDS):
                pair = r % K_FIELDS * (K_N // 2) + word
                scale = half(read(k_scale + row * ks_row + pair, in_k, K_ALL), r // K_FIELDS, k_up, K_HALVES)
                zero = half(read(k_zero + row * kz_row + pair, in_k, K_ALL), r // K_FIELDS, k_up, K_HALVES)
                scale *= tl.full([K_COLUMNS], 2.0 ** (KEY_SHIFT - K_W * (r % K_FIELDS)), tl.float16)
                own = tl.dot(q[r] * scale[None, :], codes[r], own)
                # eight equal columns: a tensor core is quicker than a sum across lanes
                shift = tl.dot(q[r], tl.broadcast_to(zero[:, None], [K_COLUMNS, 8]), shift)
            own = own * (factor * 2.0 ** (24 - KEY_SHIFT))[:, None] + (tl.max(shift, 1) * factor)[:, None]
            if g == 0:
                scores = own
            else:
                scores = tl.where((tokens < g * K_GROUP)[None, :], scores, own)
        for r in tl.static_range(K_HALVES * K_FIELDS if ROPE else 0):
            if r % K_FIELDS < K_FIELDS // 2:
                row = at // K_GROUP
                pair = r % K_FIELDS * (K_N // 2) + word
                x = _dequantize(
                    codes[r], k_scale + row * ks_row + pair, k_zero + row * kz_row + pair, in_k, K_ALL,
                    r // K_FIELDS, k_up, K_HALVES, K_W * (r % K_FIELDS),
                )  # fmt: skip
                y = _dequantize(
                    codes[r + K_FIELDS // 2], k_scale + row * ks_row + pair + D // 4, k_zero + row * kz_row + pair + D // 4,
                    in_k, K_ALL, r // K_FIELDS, k_up, K_HALVES, K_W * (r % K_FIELDS + K_FIELDS // 2),
                )  # fmt: skip
                c = q_channel + (r % K_FIELDS * K_N + r // K_FIELDS)
                angle = (at + tokens)[None, :] * rope_row + c[:, None]
                turned = x * tl.load(cos + angle, mask=in_k[:, None], other=0.0)
                turned -= y * tl.load(sin + angle, mask=in_k[:, None], other=0.0)
                scores = tl.dot(q[r], turned.to(tl.float16), scores)
                turned = y * tl.load(cos + angle + D // 2, mask=in_k[:, None], other=0.0)
                turned += x * tl.load(sin + angle + D // 2, mask=in_k[:, None], other=0.0)
                scores = tl.dot(q[r + K_FIELDS // 2], turned.to(tl.float16), scores)
        if ROPE:
            scores *= factor[:, None]
        if SOFTCAP:
            scores = softcap - 2 * softcap / (1 + tl.exp2(scores))  # tanh
        if BLOCK_N > K_GROUP:
            if begin + step > at:
                scores = tl.where(
                    (tokens >= (begin + step - at).to(tl.int32))[None, :], scores, -float("inf")
                )

        peak = tl.max(scores, 1)
        if tl.max(peak - high, 0) > SLACK:
            new = tl.maximum(high, peak)
            fade = tl.exp2(high - new)[:, None]
            high = new
            zacc *= fade
            faded = ()
            for r in tl.static_range(2 * V_BLOCKS * V_FIELDS):
                faded = faded + (acc[r] * fade,)
            acc = faded
        p = tl.exp2(scores - high[:, None]).to(tl.float16)
        # a column of ones behind the groups' zeros sums the weights
        z_here = v_zero + at * VZ_ROW + ((tokens * VZ_ROW)[:, None] + zg[None, :])
        zeros = tl.load(z_here, mask=zg[None, :] < V_GROUPS, other=1.0)
        zacc = tl.dot(p, zeros, zacc)
        weights = ()
        s_here = v_scale + at * VS_ROW + tokens * VS_ROW
        for g in tl.static_range(V_GROUPS):
            if V_GROUPS % 2 == 0:
                scale = half(tl.load(s_here + g // 2), g % 2, 0, 2)
            else:
                scale = tl.load(s_here + g)
            weights = weights + (p * tl.minimum(scale, limit)[None, :],)
        fresh = ()
        v_here = v_codes + at * V_ROW + (tokens * V_ROW)[:, None]
        for b in tl.static_range(V_BLOCKS):
            j = (b * (V_WIDTH // 2) + jv)[None, :]
            second = tl.where(j < V_N // 4, 0, -1).to(tl.int16)
            low, third = words(v_here, j, in_v[None, :], second, V_N, V_BITS, V_ALL, IN_PTX)
            for odd in tl.static_range(2):
                codes = fields(low, third, odd, V_BITS, IN_PTX)
                for f in tl.static_range(V_FIELDS):
                    a = acc[(b * 2 + odd) * V_FIELDS + f]
                    fresh = fresh + (
                        _weigh(a, weights, codes[f], 2 * jv + odd, f * V_N + b * V_WIDTH, V_WIDTH, V_GROUP),
                    )
        acc = fresh

    place = (q_heads * count + rows % count) * pieces + part
    total = tl.sum(tl.where(zg[None, :] == V_GROUPS, zacc, 0.0), 1)
    some = total > 0  # a split may begin where there are no tokens yet
    total = tl.where(some, total, 1.0)
    for b in tl.static_range(V_BLOCKS):
        for odd in tl.static_range(2):
            for f in tl.static_range(V_FIELDS):
                c = f * V_N + b * V_WIDTH + 2 * jv + odd
                a = acc[(b * 2 + odd) * V_FIELDS + f] * 2.0 ** (24 - V_W * f)
                for g in tl.static_range(V_GROUPS):
                    zero = tl.sum(tl.where(zg[None, :] == g, zacc, 0.0), 1)
                    a += tl.where((c // V_GROUP == g)[None, :], zero[:, None], 0.0)
                inside = present[:, None] & in_v[None, :]
                tl.store(out + place[:, None] * D + c[None, :], a / total[:, None], mask=inside)
    tl.store(lse + place, tl.where(some, (high + tl.log2(total)) / LOG2E, -float("inf")), mask=present)


@triton.jit
def _weigh(acc, weights, x, column, C0: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Add to `acc` the tokens' codes `x` of channels C0 .. C0 + WIDTH, weighted for the group that each channel is in."""
    if C0 // GROUP == (C0 + WIDTH - 1) // GROUP:
        acc = tl.dot(weights[C0 // GROUP], x, acc)
    else:
        for g in tl.static_range(C0 // GROUP, (C0 + WIDTH - 1) // GROUP + 1):
            acc = tl.dot(weights[g], tl.where(((C0 + column) // GROUP == g)[None, :], x, 0.0), acc)
    return acc


@triton.jit
def _dequantize(
    codes, scale, zero, inside, ALL: tl.constexpr, odd: tl.constexpr, up, HALVES: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Keys [channels, tokens] of a field in float32, out of pairs of scales and zeros [channels]."""
    s = half(read(scale, inside, ALL), odd, up, HALVES).to(tl.float32) * 2.0 ** (24 - SHIFT)
    z = half(read(zero, inside, ALL), odd, up, HALVES).to(tl.float32)
    return codes.to(tl.float32) * s[:, None] + z[:, None]


@triton.jit
def _join(parts_out, parts_lse, out, lse, parts, D: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS channels of one query row: its splits' outputs, weighted by exp(LSE). PARTS: `parts` or more."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    every = tl.arange(0, PARTS)
    high = tl.max(tl.load(parts_lse + row * parts + every, mask=every < parts, other=-float("inf")), 0)
    acc = tl.zeros([COLUMNS], tl.float32)
    total = 0.0
    for start in range(0, parts, 64):
        s = start + tl.arange(0, 64)
        weight = tl.exp(tl.load(parts_lse + row * parts + s, mask=s < parts, other=-float("inf")) - high)
        inside = (s < parts)[:, None] & (c < D)[None, :]
        piece = tl.load(parts_out + (row * parts + s)[:, None] * D + c[None, :], mask=inside, other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(piece * weight[:, None], 0)
    tl.store(out + row * D + c, acc / total, mask=c < D)
    if tl.program_id(1) == 0:
        tl.store(lse + row, high + tl.log(total))


COMPILED = isinstance(_attend, triton.JITFunction)
"""False in Triton's interpreter, which knows no PTX."""


def serves(head_dim: int) -> bool:
    """Whether the products and the 16-bit loads come out even."""
    return head_dim % 16 == 0 and 64 <= head_dim <= 256


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _shapes(key_bits: int, value_bits: int, dim: int, group: int) -> dict[str, int]:
    """Columns of the products: of keys at least 16 (both bytes of a word side by side, if need be), of values one group."""
    k_n, v_n = (dim * (4 if bits == 4 else 2) // 8 for bits in (key_bits, value_bits))
    halves = 2 if k_n >= 32 else 1
    width = group if v_n > group and v_n % group == 0 else v_n
    return {
        "K_HALVES": halves,
        "K_COLUMNS": triton.next_power_of_2(k_n // halves),
        "V_WIDTH": width,
        "V_COLUMNS": triton.next_power_of_2(max(8, width // 2)),
        "Z_COLUMNS": triton.next_power_of_2(max(8, math.ceil(dim / group) + 1)),
    }


def attention_packed(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    return join(*over_splits(query, key, value, scaling, rope, softcap))


def over_splits(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    rope: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    counts: Tensor | None = None,
    further: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [Hq, T, pieces, D] and LSE [Hq, T, pieces] of each split, and room for `further` pieces behind them.

    counts: its first number says how many tokens there are, if not all.
    """
    heads, count, dim = query.shape
    kv_heads, length, _ = key.codes.shape
    share = heads // kv_heads
    processors = _processors(query.device)
    cut = plan(dim, share * count, length, key.group, kv_heads, processors, rope is not None)
    shapes = _shapes(key.bits, value.bits, dim, value.group)
    k_codes, v_codes = key.codes.view(torch.int16), value.codes.view(torch.int16)
    k_scale, k_zero = key.scale.view(torch.int32), key.zero.view(torch.int32)
    v_scale = value.scale if value.scale.shape[2] % 2 else value.scale.view(torch.int32)
    parts = math.ceil(length / cut.split)
    pieces = parts + further
    new: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    out, lse = torch.empty(heads, count, pieces, dim, **new), torch.empty(heads, count, pieces, **new)
    cos, sin = rope if rope is not None else (query, query)
    scaling, softcap_ = in_exponents_of_2(scaling, softcap)
    _attend[(parts, math.ceil(share * count / cut.block_m), kv_heads)](
        query, k_codes, k_scale, k_zero, v_codes, v_scale, value.zero, cos, sin, out, lse,
        *query.stride()[:2], k_codes.stride(0), *k_scale.stride()[:2], *k_zero.stride()[:2],
        v_codes.stride(0), v_scale.stride(0), value.zero.stride(0), cos.stride(0),
        count, share, length, query if counts is None else counts, pieces, cut.split, scaling, softcap_,
        D=dim, K_BITS=key.bits, V_BITS=value.bits, K_GROUP=key.group, V_GROUP=value.group,
        ROPE=rope is not None, SOFTCAP=softcap is not None, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n,
        K_ROW=k_codes.stride(1), V_ROW=v_codes.stride(1), VS_ROW=v_scale.stride(1), VZ_ROW=value.zero.stride(1),
        **shapes, IN_PTX=COMPILED, COUNTED=counts is not None,
        num_warps=cut.warps, num_stages=cut.stages, maxnreg=cut.registers,
    )  # fmt: skip
    return out, lse


def in_exponents_of_2(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Scaling and softcap for kernels that exponentiate by 2; with a softcap, scores are what its tanh takes, doubled."""
    log2e = math.log2(math.e)
    if softcap is None:
        return scaling * log2e, 0.0
    return 2 * scaling * log2e / softcap, softcap * log2e


def join(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output [Hq, T, D] and LSE [Hq, T] of pieces [Hq, T, pieces, D] and [Hq, T, pieces]."""
    heads, count, pieces, dim = out.shape
    if pieces == 1:
        return out[:, :, 0], lse[:, :, 0]
    joined, joined_lse = torch.empty_like(out[:, :, 0]), torch.empty_like(lse[:, :, 0])
    _join[(heads * count, math.ceil(dim / 32))](
        out, lse, joined, joined_lse, pieces,
        D=dim, PARTS=triton.next_power_of_2(pieces), COLUMNS=32, num_warps=4,
    )  # fmt: skip
    return joined, joined_lse
