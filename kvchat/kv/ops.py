"""The kernels that the cache runs on, chosen here and nowhere else."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from kvchat_kernels import torch_pack
from kvchat_kernels.reference import Packed
from kvchat_kernels.torch_attend import attention, merge
from kvchat_kernels.torch_pack import dequantize
from kvchat_kernels.torch_ranked import (
    dequantize_ranked,
    dequantize_rotated,
    quantize_ranked,
    quantize_rotated,
)
from torch import Tensor

__all__ = [
    "Packed",
    "attention",
    "attention_packed",
    "dequantize",
    "dequantize_ranked",
    "dequantize_rotated",
    "merge",
    "quantize",
    "quantize_ranked",
    "quantize_rotated",
]


def attention_packed(device: torch.device, head_dim: int) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`reference.attention_packed` as one kernel on `device`; None where there is none, and tiles are dequantized."""
    if device.type == "cuda" and find_spec("triton"):
        from kvchat_kernels import triton_attend

        return triton_attend.attention_packed if triton_attend.serves(head_dim) else None
    return None


def reader(device: torch.device, head_dim: int) -> str:
    """What reads packed blocks on `device`, in words."""
    if attention_packed(device, head_dim) is None:
        return "tile loop in torch, for every format"
    return "one kernel for kivi4, kivi3 and kivi2, tile loop in torch for other formats"


def quantize(x: Tensor, bits: int, axis: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and find_spec("triton"):
        from kvchat_kernels import triton_pack

        return triton_pack.quantize(x, bits, axis, group)
    return torch_pack.quantize(x, bits, axis, group)
