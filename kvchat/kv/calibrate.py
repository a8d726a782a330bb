"""Make a `Calibration`: run a model over a text, take its keys' ranges, and fit codebooks weighted by Fisher information.

KVQuant, arXiv:2401.18079, sections 3.1 (ranges), 3.3 (codebooks, equation 7), 3.4 (outliers) and 3.6 (Q-Norm).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvchat.kv import ops
from kvchat.kv.format import NonUniform
from kvchat.kv.rope import Rope

BINS = 4096
ITERATIONS = 100
OUTLIERS = 0.01
LOGITS = 256
"""Tokens whose logits are in memory at once."""


class _Kept(CacheLayerMixin):
    """A cache layer that hands on what it is given, [1, heads, T, D], and keeps it with its gradient."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        if key_states.requires_grad:
            key_states.retain_grad()
            value_states.retain_grad()
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class _Histograms:
    """Of normalized elements in [-1, 1], [2 (without and with outliers), BINS]: how often, and weighted."""

    def __init__(self) -> None:
        self.count = torch.zeros(2, BINS, dtype=torch.float64)
        self.weight = torch.zeros(2, BINS, dtype=torch.float64)

    def add(self, kind: int, normal: Tensor, weight: Tensor) -> None:
        inside = (normal.abs() <= 1).flatten()
        bins = ((normal.flatten()[inside] + 1) / 2 * (BINS - 1)).round().long()
        self.count[kind] += torch.bincount(bins, minlength=BINS).cpu()
        self.weight[kind] += torch.bincount(bins, weight.flatten()[inside].double(), minlength=BINS).cpu()

    def levels(self) -> Tensor:
        """[2, 4 + 8 + 16] codebooks; those for 2 bits with Q-Norm."""
        rows = [
            [codebook(self.count[kind], self.weight[kind], bits, q_norm=bits == 2) for bits in (2, 3, 4)]
            for kind in (0, 1)
        ]
        return torch.stack([torch.cat(row) for row in rows]).float()


def calibrate(model: Any, pieces: Sequence[Sequence[int]]) -> Generator[int, None, dict[str, Tensor]]:
    """Read pieces of token ids twice: forward for the ranges, then forward and back for the codebooks.

    Yields the number of passes done, 2 * len(pieces) in all; returns `Calibration.tensors`. The first token of a piece, a sink,
    is left out. `model` runs with transformers' own attention meanwhile.
    """
    layers = {i: rope for i, rope in enumerate(_ropes(model)) if rope is not False}
    attention = model.config._attn_implementation
    model.requires_grad_(False)
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if capped else "sdpa")
    try:
        ends: dict[str, list[Tensor]] = {}
        for done, piece in enumerate(pieces, 1):
            kept = _run(model, piece)
            for i, rope in layers.items():
                for name, keys in (("post", kept[i].keys), ("pre", _unrotated(rope, kept[i].keys))):
                    ends.setdefault(f"{i}.keys.{name}", []).append(_ends(keys[0, :, 1:]))
            yield done
        tensors = {name: _joined(torch.stack(found)) for name, found in ends.items()}
        histograms = {(i, what): _Histograms() for i in layers for what in ("keys", "values")}
        for done, piece in enumerate(pieces, len(pieces) + 1):
            kept = _run(model, piece, backward=True)
            for i, rope in layers.items():
                keys, values = kept[i].keys, kept[i].values
                unrotated, gradient = (_unrotated(rope, t)[0, :, 1:] for t in (keys.detach(), keys.grad))
                ranges = tensors[f"{i}.keys.pre"].to(keys.device)
                _add_keys(histograms[i, "keys"], unrotated, gradient, ranges)
                _add_values(histograms[i, "values"], values.detach()[0, :, 1:], values.grad[0, :, 1:])
            yield done
    finally:
        model.set_attn_implementation(attention)
    return {name: ends.half() for name, ends in tensors.items()} | {
        f"{i}.{what}.levels": histogram.levels() for (i, what), histogram in histograms.items()
    }


def _ropes(model: Any) -> list[Rope | None | bool]:
    """The rotation of each layer's keys; None where it has none, False for a layer that isn't packed."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    ropes: list[Rope | None | bool] = []
    for layer, kind in zip(decoder.layers, get_layer_types_and_kwargs(config)[0], strict=True):
        attention = layer.self_attn
        if kind != "full_attention":
            ropes.append(False)
        else:
            rotated = getattr(attention, "use_rope", True)
            ropes.append(Rope(decoder.rotary_emb, attention, kind) if rotated else None)
    return ropes


def _unrotated(rope: Any, keys: Tensor) -> Tensor:
    if rope is None:
        return keys
    positions = torch.arange(keys.shape[2], device=keys.device)
    return rope.unrotate(keys[0], positions)[None]


def _run(model: Any, piece: Sequence[int], backward: bool = False) -> list[Any]:
    """The layers' keys and values for a piece, with the gradients of the loss on its own next tokens if `backward`."""
    ids = torch.tensor([piece], device=model.device)
    cache = Cache(layers=[_Kept() for _ in model.get_decoder().layers])
    with torch.set_grad_enabled(backward):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(backward)
        hidden = model.get_decoder()(inputs_embeds=embedded, cache=cache, use_cache=True).last_hidden_state
        if backward:
            hidden.backward(_hidden_gradient(model, hidden.detach()[0], ids[0])[None])
    return cache.layers


def _hidden_gradient(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Of the summed loss with respect to the last hidden states [T, width], few logits at a time."""
    gradient = torch.zeros_like(hidden)
    for start in range(0, len(ids) - 1, LOGITS):
        part = hidden[start : min(start + LOGITS, len(ids) - 1)].clone().requires_grad_()
        logits = model.get_output_embeddings()(part).float()
        loss = F.cross_entropy(logits, ids[start + 1 : start + 1 + len(part)], reduction="sum")
        (gradient[start : start + len(part)],) = torch.autograd.grad(loss, part)
    return gradient


def _ends(keys: Tensor) -> Tensor:
    """[4, heads, D]: percentiles that leave the outliers out, minimum, maximum of keys [heads, T, D]."""
    keys = keys.float()
    outside = torch.tensor([OUTLIERS / 2, 1 - OUTLIERS / 2], device=keys.device)
    return torch.cat([keys.quantile(outside, 1), keys.amin(1)[None], keys.amax(1)[None]])


def _joined(ends: Tensor) -> Tensor:
    """[pieces, 4, heads, D] to one: mean percentiles, extreme extremes."""
    return torch.cat([ends[:, :2].mean(0), ends[:, 2].amin(0)[None], ends[:, 3].amax(0)[None]])


def _add_keys(histograms: _Histograms, keys: Tensor, gradient: Tensor, ends: Tensor) -> None:
    for kind, (low, high) in enumerate(((ends[2], ends[3]), (ends[0], ends[1]))):
        zero, radius = ((high + low) / 2)[:, None], ((high - low) / 2).clamp_min(1e-6)[:, None]
        histograms.add(kind, (keys - zero) / radius, (gradient * radius).square())


def _add_values(histograms: _Histograms, values: Tensor, gradient: Tensor) -> None:
    for kind, outliers in enumerate((False, True)):
        count = NonUniform(2, "token", outliers).outliers_of(values.shape[0] * values.shape[2])
        levels = torch.linspace(-1, 1, 4, device=values.device)
        _, zero, radius, _, _ = ops.quantize_tokens(values, levels, 2, count)
        zero, radius = zero.float(), radius.float().clamp_min(1e-6)
        histograms.add(kind, (values - zero) / radius, (gradient * radius).square())


def codebook(count: Tensor, weight: Tensor, bits: int, q_norm: bool) -> Tensor:
    """2**bits levels, rising, by weighted k-means in one dimension (equation 7) on histograms [BINS] over [-1, 1].

    q_norm: shift and scale them so that what is quantized keeps its mean and deviation (unweighted).
    """
    places = torch.linspace(-1, 1, BINS, dtype=torch.float64)
    # a start near the optimum: levels as dense as the cube root of the density (Panter and Dite, 1951)
    share = weight.pow(1 / 3).cumsum(0)
    wanted = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits * share[-1]
    levels = places[torch.searchsorted(share, wanted).clamp_max(BINS - 1)]
    for _ in range(ITERATIONS):
        nearest = torch.bucketize(places, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add_(0, nearest, weight)
        moment = torch.zeros_like(levels).index_add_(0, nearest, weight * places)
        levels = torch.where(mass > 0, moment / mass, levels)
    if q_norm:
        mean, deviation = _moments(places, count)
        got_mean, got_deviation = _moments(
            levels[torch.bucketize(places, (levels[1:] + levels[:-1]) / 2)], count
        )
        levels = (levels - got_mean) * (deviation / got_deviation.clamp_min(1e-9)) + mean
    return levels


def _moments(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    mean = (x * count).sum() / count.sum()
    return mean, ((x - mean).square() * count).sum().div(count.sum()).sqrt()
