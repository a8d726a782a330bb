"""Planned bytes against the bytes of real caches, and what fits."""

from typing import Any

import pytest
import torch
from tiny import tiny_calibration, tiny_model, tokens

from kvchat.kv import attention
from kvchat.kv.cache import KVCache
from kvchat.kv.format import PRESETS, parse
from kvchat.kv.shape import CacheShape, LayerShape
from kvchat.memory import Usage, fits, human, true_bits, usage
from kvchat.models.families import cache_shape

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {"head_dim": 64}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "mha": ("llama", {"num_key_value_heads": 4, "head_dim": 80}),
    "sliding": ("gemma3_text", {}),
    "alternating": ("gemma2", {}),
}
SPECS = [
    *PRESETS,
    "kivi2:sink=4",
    "kivi3:k=4,v=2,group=64,window=32,sink=3",
    "kivi2:v=16,window=0",
    "fp16:k=32,v=32",
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    attention.register()
    opened = {}
    for name, (family, settings) in MODELS.items():
        opened[name] = tiny_model(family, **settings)
        opened[name].set_attn_implementation(attention.NAME)
    return opened


@torch.no_grad()
def held(model: Any, spec: str, count: int, chunk: int = 90) -> KVCache:
    fmt = parse(spec)
    cache = KVCache(model, fmt, tiny_calibration(model) if fmt.calibrated else None)
    ids = torch.tensor([tokens(count)])
    for start in range(0, count, chunk):
        model(ids[:, start : start + chunk], cache=cache, use_cache=True, logits_to_keep=1)
    cache.seal()
    return cache


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_exact(name: str, spec: str, models: dict[str, Any]) -> None:
    shape, fmt = cache_shape(models[name].config.to_dict()), parse(spec)
    for count in (1, 5, 31, 32, 129, 160, 164, 333):
        assert usage(shape, fmt, count, 4).in_use == held(models[name], spec, count).nbytes


def test_half_precision_halves_what_is_dense(models: dict[str, Any]) -> None:
    half = tiny_model("llama", head_dim=64).bfloat16()
    half.set_attn_implementation(attention.NAME)
    shape = cache_shape(half.config.to_dict())
    for spec in ("kivi2:sink=4", "fp16"):
        assert usage(shape, parse(spec), 300, 2).in_use == held(half, spec, 300).nbytes


def test_another_shape_plans_another_number(models: dict[str, Any]) -> None:
    """Negative control: a head, a layer or a block more, and the plan is off by far more than a per cent."""
    exact = held(models["gqa"], "kivi2", 333).nbytes
    layer = LayerShape(2, 64)
    fmt = parse("kivi2")
    assert usage(CacheShape((layer,) * 4), fmt, 333, 4).in_use == exact
    for shape, count in (
        (CacheShape((LayerShape(3, 64),) * 4), 333),
        (CacheShape((LayerShape(2, 80),) * 4), 333),
        (CacheShape((layer,) * 5), 333),
        (CacheShape((layer,) * 4), 365),
    ):
        assert usage(shape, fmt, count, 4).in_use > 1.01 * exact


def test_usage_of_kivi2_at_length() -> None:
    shape = CacheShape((LayerShape(8, 128),) * 32)
    plan = usage(shape, parse("kivi2"), 128_000, 2)
    assert plan.fp16 == 2 * 2 * 8 * 128 * 32 * 128_000
    assert plan.true_bits == 3.0
    assert 5.2 < plan.ratio < 16 / 3


def test_measured_bytes_take_the_place_of_planned_ones() -> None:
    shape = CacheShape((LayerShape(1, 64),))
    assert usage(shape, parse("fp16"), 10, 2, in_use=5) == Usage("fp16", 10, 5, 2 * 2 * 64 * 10, 16.0)
    assert Usage("fp16", 0, 0, 0, 16.0).ratio == 1.0


def test_true_bits_are_weighted_by_elements_and_leave_sliding_layers_out() -> None:
    shape = CacheShape((LayerShape(2, 64), LayerShape(6, 16), LayerShape(9, 64, window=16)))
    fmt = parse("kivi2")
    assert true_bits(shape, fmt) == pytest.approx((128 * 3.0 + 96 * 3.5) / 224)
    assert true_bits(CacheShape((LayerShape(9, 64, window=16),)), fmt) == 16.0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("free", [0, 1000, 100_000, 10_000_000])
def test_what_fits_is_the_most_that_fits(spec: str, free: int) -> None:
    shape, fmt = CacheShape((LayerShape(2, 64), LayerShape(2, 64, window=128))), parse(spec)
    count = fits(shape, fmt, 4, free)
    assert usage(shape, fmt, count, 4).in_use <= free or count == 0
    assert usage(shape, fmt, count + 1, 4).in_use > free


def test_a_model_that_only_slides_fits_any_length() -> None:
    assert fits(CacheShape((LayerShape(2, 64, window=16),)), parse("kivi2"), 4, 10**6) > 10**9


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (320 << 10, "320 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human(count) == text
