"""`reference_ranked.quantize_ranked` on the CPU, by a loop that numba compiles: its search made prefill a third slower in torch.

numba keeps what it compiled as long as this file does not change: touch it after a change of `cpu_loops`.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from kvchat_kernels.cpu_attend import _shared
from kvchat_kernels.cpu_loops import compiled, inlined
from kvchat_kernels.reference_ranked import RATIOS, decode_scale
from torch import Tensor

_SCALES = decode_scale(torch.arange(256)).numpy()
_RATIOS = np.array(RATIOS, np.float32)


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens, channels = x.shape
    groups = tokens // group
    codes = torch.empty(heads, groups, sum(bits) * group // 8, dtype=torch.uint8)
    scales = torch.empty(heads, groups, channels, dtype=torch.uint8)
    zeros = torch.empty(heads, groups, channels)
    arrays = (t.numpy() for t in (x.float().contiguous(), codes, scales, zeros))
    _shared(_kernel(bits, group), heads * groups, *arrays)
    return codes, scales, zeros.half()


@inlined
def _encoded(scale: Any) -> int:
    """`reference_ranked.encode_scale` of one scale."""
    code = np.rint(math.log2(max(scale, np.float32(2.0**-16))) * 8) + 128
    return int(min(max(code, 0), 255))


@inlined
def _nearest(x: Any, scale: Any, zero: Any, top: Any) -> Any:
    return min(max(np.rint((x - zero) / scale), np.float32(0)), top)


@functools.cache
def _kernel(bits: tuple[int, ...], group: int) -> Any:
    widths, scale_of, ratios = np.array(bits), _SCALES, _RATIOS

    @compiled
    def quantize(first: int, end: int, x: Any, codes: Any, scales: Any, zeros: Any) -> None:
        """A job is a head and a group of tokens."""
        groups, channels = scales.shape[1:]
        values, code = np.empty(group, np.float32), np.empty(group, np.float32)
        whole = np.empty(group, np.uint8)
        for job in range(first, end):
            head, g = job // groups, job % groups
            at = 0
            for c in range(channels):
                for t in range(group):
                    values[t] = x[head, g * group + t, c]
                top = np.float32((1 << widths[c]) - 1)
                low, high = values.min(), values.max()
                middle, half = (high + low) / 2, (high - low) / 2
                least, best, best_zero = np.float32(np.inf), np.float32(1), np.float32(0)
                for i in range(ratios.shape[0]):
                    scale = scale_of[_encoded(2 * half * ratios[i] / top)]
                    zero = middle - scale * top / 2
                    error = np.float32(0)
                    for t in range(group):
                        off = _nearest(values[t], scale, zero, top) * scale + zero - values[t]
                        error += off * off
                    if error < least:
                        least, best, best_zero = error, scale, zero
                mean = code_mean = np.float32(0)
                for t in range(group):
                    code[t] = _nearest(values[t], best, best_zero, top)
                    whole[t] = np.uint8(code[t])
                    mean += values[t]
                    code_mean += code[t]
                mean /= group
                code_mean /= group
                spread = code_spread = np.float32(0)
                for t in range(group):
                    spread += (values[t] - mean) ** 2
                    code_spread += (code[t] - code_mean) ** 2
                if code_spread > 0:
                    best = np.float32(math.sqrt(spread / code_spread))
                scales[head, g, c] = _encoded(best)
                zeros[head, g, c] = mean - scale_of[scales[head, g, c]] * code_mean
                shift = 0
                for width in (4, 2, 1):
                    if widths[c] & width:
                        run = group * width // 8
                        for j in range(run):
                            byte = 0
                            for f in range(8 // width):
                                byte |= (whole[f * run + j] >> shift & (1 << width) - 1) << f * width
                            codes[head, g, at + j] = byte
                        at += run
                        shift += width

    return quantize
