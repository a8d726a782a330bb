"""The loops of `cpu_attend`, compiled by numba for one head_dim and way of packing at a time, and kept on disk by it.

They are written for LLVM to vectorize: lengths are constants of what is compiled, and what a lane reads lies beside what the next
one reads. Where it did not (a run of channels in a bit plane is short, and what is read might overlap what is written), `_run`
spells the vectors out.

All in one file, since numba takes what it kept for current as long as the file of a kernel is unchanged.
"""

import functools
import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK = 32
"""Tokens unpacked at once: the smallest group of keys."""

SPLIT = 512
"""Tokens whose attention is computed apart."""

inlined = numba.njit(inline="always")
# sums in any order, so that they can run in lanes; NaN and infinity keep their meaning
compiled = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


class Rows(NamedTuple):
    """The packed rows of all heads: flat arrays (scale and zero as the bits of float16), and from one head to the next."""

    codes: Any
    scale: Any
    zero: Any
    codes_stride: int
    scale_stride: int
    zero_stride: int


@inlined
def _half(bits: Any) -> Any:
    """The float32 of a float16's bits."""
    sign, magnitude = (bits & 0x8000) << 16, (bits & 0x7FFF) << 13
    if magnitude >= 0x0F800000:  # infinity or NaN
        return np.uint32(sign | magnitude | 0x7F800000).view(np.float32)
    # the exponents' biases differ by 112; subnormals come out right
    return np.uint32(sign | magnitude).view(np.float32) * np.float32(2.0**112)


@inlined
def _exp(x: Any) -> Any:
    """e**x for float32 up to 88, to 2 units in the last place; below -87, e**-87. NaN stays NaN.

    As Cephes does it: 2**n times a polynomial on -ln(2) / 2 .. ln(2) / 2.
    """
    if x < np.float32(-87):
        x = np.float32(-87)
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@inlined
def _softmax(x: Any) -> Any:
    """Turn scores into their softmax where they lie; returns their LSE."""
    top = x[0]
    for i in range(x.shape[0]):
        top = x[i] if x[i] > top else top
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] = _exp(x[i] - top)
        total += x[i]
    for i in range(x.shape[0]):
        x[i] /= total
    return top + np.float32(np.log(total))


@inlined
def _cap(x: Any, softcap: Any) -> None:
    """softcap * tanh(x / softcap), in place."""
    for i in range(x.shape[0]):
        doubled = 2 * x[i] / softcap
        doubled = np.float32(-40) if doubled < -40 else np.float32(40) if doubled > 40 else doubled
        x[i] = softcap - 2 * softcap / (_exp(doubled) + np.float32(1))


@intrinsic
def _run(
    typing: Any,
    codes: Any,
    at: Any,
    shift: Any,
    mask: Any,
    step: Any,
    low: Any,
    out: Any,
    to: Any,
    lanes: Any,
    more: Any,
) -> Any:
    """out[to + i] = (codes[at + i] >> shift & mask) * step + low for i < lanes; with `more`, out[to + i] takes the place of low.

    codes is a flat uint8 array, out a flat float32 array; lanes and more are constants.
    """
    if not (isinstance(lanes, types.IntegerLiteral) and isinstance(more, types.BooleanLiteral)):
        raise numba.TypingError("lanes and more must be constants")

    def vector(element: ir.Type) -> ir.VectorType:
        return ir.VectorType(element, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer, floating = ir.IntType(32), ir.FloatType()

        def address(array: int, index: int, element: ir.Type) -> Any:
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            return builder.bitcast(builder.gep(data, [args[index]]), vector(element).as_pointer())

        def everywhere(value: Any, element: ir.Type) -> Any:
            one = builder.insert_element(ir.Constant(vector(element), ir.Undefined), value, integer(0))
            return builder.shuffle_vector(one, one, ir.Constant(vector(integer), [0] * lanes.literal_value))

        def integers(i: int) -> Any:
            return everywhere(context.cast(builder, args[i], signature.args[i], types.int32), integer)

        raw = builder.zext(builder.load(address(0, 1, ir.IntType(8)), align=1), vector(integer))
        code = builder.and_(builder.lshr(raw, integers(2)), integers(3))
        place = address(6, 7, floating)
        base = builder.load(place, align=4) if more.literal_value else everywhere(args[5], floating)
        scaled = builder.fmul(
            builder.uitofp(code, vector(floating)), everywhere(args[4], floating), flags=("contract",)
        )
        builder.store(builder.fadd(scaled, base, flags=("contract",)), place, align=4)
        return context.get_dummy_value()

    number, real = types.intp, types.float32
    return types.void(codes, number, number, number, real, real, out, number, lanes, more), generate


def _lanes(dim: int, width: int) -> int:
    """The widest vector, up to 16 lanes, that divides a run of channels in a bit plane of `width`."""
    return math.gcd(16, dim * width // 8)


@inlined
def _unpack(
    codes: Any,
    at: Any,
    bits: Any,
    dim: Any,
    lanes: Any,
    top_lanes: Any,
    step: Any,
    low: Any,
    groups: Any,
    width: Any,
    out: Any,
) -> None:
    """BLOCK rows from codes[at] on to out [BLOCK * dim] as code * step + low; `top_lanes` for the plane of a third bit.

    A token has `groups` steps and lows, for `width` channels each.
    """
    row = dim * bits // 8
    plane = 4 if bits == 4 else 2
    run = dim * plane // 8
    for t in range(BLOCK):
        for f in range(8 // plane):
            for c in range(f * run, (f + 1) * run, lanes):
                g = t * groups + c // width
                start = at + t * row + c - f * run
                _run(codes, start, f * plane, 2**plane - 1, step[g], low[g], out, t * dim + c, lanes, False)
    if bits == 3:
        for t in range(BLOCK):
            for f in range(8):
                for c in range(f * dim // 8, (f + 1) * dim // 8, top_lanes):
                    g = t * groups + c // width
                    start = at + t * row + run + c - f * dim // 8
                    _run(codes, start, f, 1, 4 * step[g], low[g], out, t * dim + c, top_lanes, True)


@inlined
def _scale(rows: Any, head: Any, first: Any, step: Any, low: Any) -> None:
    """Scale and zero from row element `first` of a head on, as many as step and low have room for."""
    scale_at, zero_at = head * rows.scale_stride + first, head * rows.zero_stride + first
    scale, zero = (
        rows.scale[scale_at : scale_at + step.shape[0]],
        rows.zero[zero_at : zero_at + step.shape[0]],
    )
    for i in range(step.shape[0]):
        step[i] = _half(scale[i])
        low[i] = _half(zero[i])


@inlined
def _turn(block: Any, dim: Any, step: Any, low: Any, cos: Any, sin: Any) -> None:
    """Codes of keys [BLOCK, dim] to keys after RoPE, in place; step and low [dim], cos and sin [BLOCK, dim]."""
    half = dim // 2
    for t in range(BLOCK):
        for c in range(half):
            a = block[t, c] * step[c] + low[c]
            b = block[t, half + c] * step[half + c] + low[half + c]
            block[t, c] = a * cos[t, c] - b * sin[t, c]
            block[t, half + c] = b * cos[t, half + c] + a * sin[t, half + c]


@functools.cache
def kernels(dim: int, key_bits: int, value_bits: int, value_group: int) -> tuple[Any, Any, Any]:
    """`attend`, `stage` and `join`, each compiled at its first call. The first two do the jobs first .. end of all."""
    key_row, value_row = dim * key_bits // 8, dim * value_bits // 8
    key_lanes, value_lanes = (_lanes(dim, 4 if bits == 4 else 2) for bits in (key_bits, value_bits))
    top_lanes = _lanes(dim, 1)  # of the third bit
    groups = -(-dim // value_group)

    @compiled
    def attend(
        first: int,
        end: int,
        query: Any,
        keys: Any,
        key_group: int,
        values: Any,
        tokens: int,
        cos: Any,
        sin: Any,
        softcap: Any,
        outputs: Any,
        lses: Any,
    ) -> None:
        """A job is a head and a split. query [Hkv, rows, dim], scaled; outputs [Hkv, splits, rows, dim]; softcap 0 is none."""
        splits, rows = outputs.shape[1:3]
        block = np.empty((BLOCK, dim), np.float32)
        flat = block.reshape(BLOCK * dim)
        step, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
        steps, lows = np.empty(BLOCK * groups, np.float32), np.empty(BLOCK * groups, np.float32)
        ones, zeros = np.ones(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        scaled = np.empty(dim, np.float32)
        weights = np.empty((rows, SPLIT), np.float32)
        for job in range(first, end):
            head, split = job // splits, job % splits
            start = split * SPLIT
            count = min(SPLIT, tokens - start)
            q, o = query[head], outputs[head, split]
            for at in range(0, count, BLOCK):
                token = start + at
                codes_at = head * keys.codes_stride + token * key_row
                _unpack(keys.codes, codes_at, key_bits, dim, key_lanes, top_lanes, ones, zeros, 1, dim, flat)
                _scale(keys, head, token // key_group * dim, step, low)
                if cos.shape[0]:
                    _turn(block, dim, step, low, cos[token : token + BLOCK], sin[token : token + BLOCK])
                for r in range(rows):
                    if cos.shape[0]:
                        scaled[:] = q[r]
                        offset = np.float32(0)
                    else:  # q (k s + z) = (q s) k + q z, for all tokens of a group
                        offset = np.float32(0)
                        for c in range(dim):
                            scaled[c] = q[r, c] * step[c]
                            offset += q[r, c] * low[c]
                    for t in range(BLOCK):
                        score = np.float32(0)
                        for c in range(dim):
                            score += scaled[c] * block[t, c]
                        weights[r, at + t] = score + offset
            for r in range(rows):
                if softcap != 0:
                    _cap(weights[r, :count], softcap)
                lses[head, split, r] = _softmax(weights[r, :count])
            o[:] = 0
            for at in range(0, count, BLOCK):
                token = start + at
                codes_at = head * values.codes_stride + token * value_row
                _scale(values, head, token * groups, steps, lows)
                _unpack(
                    values.codes,
                    codes_at,
                    value_bits,
                    dim,
                    value_lanes,
                    top_lanes,
                    steps,
                    lows,
                    groups,
                    value_group,
                    flat,
                )
                for r in range(rows):
                    for t in range(0, BLOCK, 8):
                        w = weights[r, at + t : at + t + 8]
                        for c in range(dim):
                            o[r, c] += (
                                (w[0] * block[t, c] + w[1] * block[t + 1, c])
                                + (w[2] * block[t + 2, c] + w[3] * block[t + 3, c])
                                + (w[4] * block[t + 4, c] + w[5] * block[t + 5, c])
                                + (w[6] * block[t + 6, c] + w[7] * block[t + 7, c])
                            )

    @compiled
    def stage(
        first: int,
        end: int,
        keys: Any,
        key_group: int,
        values: Any,
        start: int,
        cos: Any,
        sin: Any,
        keys_out: Any,
        values_out: Any,
    ) -> None:
        """A job is a head and a block; tokens from `start` on go to keys_out and values_out [Hkv, n, dim]."""
        blocks = keys_out.shape[1] // BLOCK
        step, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
        steps, lows = np.empty(BLOCK * groups, np.float32), np.empty(BLOCK * groups, np.float32)
        ones, zeros = np.ones(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        for job in range(first, end):
            head, at = job // blocks, job % blocks * BLOCK
            token = start + at
            block = keys_out[head, at : at + BLOCK]
            codes_at = head * keys.codes_stride + token * key_row
            _unpack(
                keys.codes,
                codes_at,
                key_bits,
                dim,
                key_lanes,
                top_lanes,
                ones,
                zeros,
                1,
                dim,
                block.reshape(BLOCK * dim),
            )
            _scale(keys, head, token // key_group * dim, step, low)
            if cos.shape[0]:
                _turn(block, dim, step, low, cos[token : token + BLOCK], sin[token : token + BLOCK])
            else:
                for t in range(BLOCK):
                    for c in range(dim):
                        block[t, c] = block[t, c] * step[c] + low[c]
            block = values_out[head, at : at + BLOCK].reshape(BLOCK * dim)
            codes_at = head * values.codes_stride + token * value_row
            _scale(values, head, token * groups, steps, lows)
            _unpack(
                values.codes,
                codes_at,
                value_bits,
                dim,
                value_lanes,
                top_lanes,
                steps,
                lows,
                groups,
                value_group,
                block,
            )

    return attend, stage, _join


@compiled
def _join(outputs: Any, lses: Any) -> Any:
    """Merge splits by LSE: outputs [Hkv, splits, rows, dim] and LSEs [Hkv, splits, rows] to one of each."""
    heads, splits, rows, dim = outputs.shape
    output, lse = np.zeros((heads, rows, dim), np.float32), np.empty((heads, rows), np.float32)
    for h in range(heads):
        for r in range(rows):
            shares = lses[h, :, r].copy()
            lse[h, r] = _softmax(shares)
            for split in range(splits):
                for c in range(dim):
                    output[h, r, c] += shares[split] * outputs[h, split, r, c]
    return output, lse
