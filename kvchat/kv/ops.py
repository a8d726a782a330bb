"""The kernels that the cache runs on, chosen here and nowhere else."""

from kvchat_kernels.torch_attend import attention, merge
from kvchat_kernels.torch_pack import dequantize, quantize

__all__ = ["attention", "dequantize", "merge", "quantize"]
