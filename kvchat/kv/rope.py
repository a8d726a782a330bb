"""The model's own rotary embedding, applied and undone: keys that are stored before RoPE need both."""

import sys
from typing import Any

import torch
from torch import Tensor

from kvchat.errors import ModelRefused

LENGTH_DEPENDENT = ("dynamic", "longrope")
GROWTH = 1024
"""Positions by which the table of cos and sin grows beyond what is asked for."""


class Rope:
    """R(position) and its inverse for the keys of one layer, by the functions of the model's own module.

    Interleaved and partial rotary come for free. Raises ModelRefused where the rotation depends on the sequence's length
    (its inverse would differ from step to step), or where undoing it does not give a key back.
    """

    def __init__(self, embedding: Any, attention: Any, layer_type: str):
        typed = hasattr(embedding, "layer_types")
        kind = embedding.rope_type[layer_type] if typed else embedding.rope_type
        if kind in LENGTH_DEPENDENT:
            raise ModelRefused(
                f"RoPE type {kind!r} changes with the length, so keys cannot be stored before RoPE; take rope=post"
            )
        module = sys.modules[type(attention).__module__]
        self._embedding, self._args = embedding, (layer_type,) if typed else ()
        self._apply: Any = getattr(module, "apply_rotary_pos_emb", None)
        if not self._can_undo(attention.head_dim):
            raise ModelRefused(
                f"the rotation in {module.__name__} cannot be undone from outside, so keys cannot be stored before RoPE; "
                "take rope=post"
            )
        self.halves = self._turns_halves(attention.head_dim)
        self._table = torch.empty(2, 0, attention.head_dim)
        self._columns = self._table

    def _turns_halves(self, head_dim: int) -> bool:
        """Whether channels c and c + D/2 turn together, all of them, as kernels over packed keys do it."""
        device = next(self._embedding.buffers()).device
        key = torch.linspace(-1, 1, 2 * head_dim, device=device).view(1, 2, head_dim)
        positions = torch.tensor([3, 700], device=device)
        cos, sin = self._cos_sin(key, positions)
        if cos.shape[-1] != head_dim:
            return False
        first, second = key.chunk(2, -1)
        turned = key * cos + torch.cat([-second, first], -1) * sin
        return torch.allclose(turned, self.rotate(key, positions), atol=1e-5)

    def table(self, tokens: int, by_channel: bool = False) -> Tensor:
        """cos and sin [2, tokens, D] of the first positions, float32, for keys whose `halves` turn; kept for the next call.

        by_channel: the positions of a channel lie side by side.
        """
        if self._table.shape[1] < tokens:
            device = next(self._embedding.buffers()).device
            positions = torch.arange(tokens + GROWTH, device=device)
            like = self._table.to(device)
            self._table = torch.stack(self._cos_sin(like, positions))[:, 0]
        if not by_channel:
            return self._table[:, :tokens]
        if self._columns.shape[1] < tokens:
            self._columns = self._table.transpose(1, 2).contiguous().transpose(1, 2)
        return self._columns[:, :tokens]

    def _cos_sin(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, D] each, of `like`'s type and device."""
        return self._embedding(like, positions[None], *self._args)

    def _can_undo(self, head_dim: int) -> bool:
        """Some models slice the rotated channels themselves before they call their rotary function."""
        device = next(self._embedding.buffers()).device
        key = torch.linspace(-1, 1, head_dim, device=device).expand(1, 2, head_dim)
        positions = torch.tensor([3, 700], device=device)
        try:
            back = self.unrotate(self.rotate(key, positions), positions)
        except (RuntimeError, TypeError):
            return False
        return torch.allclose(back, key, atol=1e-4)

    def _turn(self, keys: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        x = keys.float()[None]
        cos, sin = self._cos_sin(x, positions)
        if inverse:
            # YaRN scales cos and sin by a: the inverse divides by a**2 = cos**2 + sin**2
            square = cos * cos + sin * sin
            cos, sin = cos / square, -sin / square
        return self._apply(x, x, cos, sin)[1][0].to(keys.dtype)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """R(position) k. keys: [heads, T, D]; positions: [T] integers. Computed in float32, returned in keys' dtype."""
        return self._turn(keys, positions, inverse=False)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """R(-position) k, with the shapes of `rotate`."""
        return self._turn(keys, positions, inverse=True)
