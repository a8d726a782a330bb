"""The kernels that the cache runs on, chosen here and nowhere else."""

from kvchat_kernels.torch_attend import attention, merge
from kvchat_kernels.torch_nonuniform import dequantize_nonuniform, quantize_channels, quantize_tokens
from kvchat_kernels.torch_pack import dequantize, quantize
from kvchat_kernels.torch_ranked import (
    dequantize_ranked,
    dequantize_rotated,
    quantize_ranked,
    quantize_rotated,
)

__all__ = [
    "attention",
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
