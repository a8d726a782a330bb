"""The kernels that the cache runs on, chosen here and nowhere else."""

from importlib.util import find_spec
from typing import Any

import torch
from kvchat_kernels import torch_pack, torch_ranked
from kvchat_kernels.reference import Packed
from kvchat_kernels.reference_ranked import PackedRanked, PackedRotated
from kvchat_kernels.torch_attend import attention, merge
from kvchat_kernels.torch_nonuniform import dequantize_nonuniform, quantize_channels, quantize_tokens
from kvchat_kernels.torch_ranked import dequantize_ranked, dequantize_rotated, quantize_rotated
from torch import Tensor

__all__ = [
    "Packed",
    "PackedRanked",
    "PackedRotated",
    "attention",
    "attention_packed",
    "attention_step",
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
    "reads_codes",
]


def reads_codes(device: torch.device, head_dim: int, ranked: bool) -> bool:
    """Whether `attention_packed` has a kernel on `device`: for keys by rank, or for those of KIVI."""
    if device.type != "cuda":
        return device.type == "cpu"
    if ranked or not find_spec("triton"):
        return False
    from kvchat_kernels import triton_attend

    return triton_attend.serves(head_dim)


def attention_packed(
    query: Tensor, key: Packed | PackedRanked, *args: Any, **settings: Any
) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        from kvchat_kernels import triton_attend

        return triton_attend.attention_packed(query, key, *args, **settings)
    # importing numba takes as long as answering some tokens, which only those who run it should wait for
    from kvchat_kernels import cpu_attend, cpu_ranked

    kernel: Any = cpu_ranked if isinstance(key, PackedRanked) else cpu_attend
    return kernel.attention_packed(query, key, *args, **settings)


def attention_step(query: Tensor, *args: Any, **settings: Any) -> Tensor:
    from kvchat_kernels import triton_step

    return triton_step.attention_step(query, *args, **settings)


def quantize(x: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _packing(x).quantize(x, *how)


def dequantize(codes: Tensor, *how: Any) -> Tensor:
    return _packing(codes).dequantize(codes, *how)


def _packing(x: Tensor) -> Any:
    if not x.is_cuda or not find_spec("triton"):
        return torch_pack
    from kvchat_kernels import triton_pack

    return triton_pack


def quantize_ranked(x: Tensor, bits: tuple[int, ...], group: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.device.type != "cpu":
        return torch_ranked.quantize_ranked(x, bits, group)
    from kvchat_kernels import cpu_pack

    return cpu_pack.quantize_ranked(x, bits, group)
