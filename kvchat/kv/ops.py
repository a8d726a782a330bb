"""The kernels that the cache runs on, chosen here and nowhere else."""

from typing import Any

from kvchat_kernels import torch_ranked
from kvchat_kernels.reference import Packed
from kvchat_kernels.reference_ranked import PackedRanked, PackedRotated
from kvchat_kernels.torch_attend import attention, merge
from kvchat_kernels.torch_nonuniform import dequantize_nonuniform, quantize_channels, quantize_tokens
from kvchat_kernels.torch_pack import dequantize, quantize
from kvchat_kernels.torch_ranked import dequantize_ranked, dequantize_rotated, quantize_rotated
from torch import Tensor

__all__ = [
    "Packed",
    "PackedRanked",
    "PackedRotated",
    "attention",
    "attention_packed",
    "dequantize",
    "dequantize_nonuniform",
    "dequantize_ranked",
    "dequantize_rotated",
    "merge",
    "quantize",
    "quantize_channels",
    "quantize_ranked",
    "quantize_rotated",
    "quantize_tokens",
]


def attention_packed(
    query: Tensor, key: Packed | PackedRanked, *args: Any, **settings: Any
) -> tuple[Tensor, Tensor]:
    # importing numba takes as long as answering some tokens, which only those who run it should wait for
    from kvchat_kernels import cpu_attend, cpu_ranked

    kernel: Any = cpu_ranked if isinstance(key, PackedRanked) else cpu_attend
    return kernel.attention_packed(query, key, *args, **settings)


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type != "cpu":
        return torch_ranked.quantize_ranked(x, bits, group)
    from kvchat_kernels import cpu_pack

    return cpu_pack.quantize_ranked(x, bits, group)
