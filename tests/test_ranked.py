"""kvchat's own formats: bits by rank for keys, rotated values; fast against reference, and what they are chosen for."""

import kvchat_kernels.reference_ranked as reference
import kvchat_kernels.torch_ranked as fast
import pytest
import torch
from kvchat_kernels.reference import pack
from test_kv_cache import forward
from tiny import tiny_loaded, tiny_model, tokens

from kvchat.kv.cache import KVCache
from kvchat.kv.format import PRESETS, Ranked
from kvchat.kv.layer import PackedLayer, _rank
from kvchat.memory import usage

SIZES = (16, 64, 80, 96, 128, 256)
OURS = ("kvchat2", "kvchat3")


def samples(heads: int, count: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Keys of uneven channels, some far from zero, one constant."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, count, channels, generator=generator)
    x *= torch.logspace(1, -1, channels)
    x[..., 1] += 50
    x[..., 2] = 3.0
    return x


@pytest.mark.parametrize("channels", SIZES)
@pytest.mark.parametrize("name", OURS)
def test_channels_are_rows_of_their_own_bits_and_round_trip(name: str, channels: int) -> None:
    bits = PRESETS[name].keys.bits_by_rank(channels)  # type: ignore[union-attr]
    assert len(bits) == channels
    assert list(bits) == sorted(bits, reverse=True)
    assert bits[::2] == bits[1::2]  # a pair stays together
    generator = torch.Generator().manual_seed(1)
    codes = torch.stack([torch.randint(0, 2**b, (3, 64), generator=generator) for b in bits], -1)
    codes = codes.to(torch.uint8)
    packed = reference.pack_ranked(codes, bits, 32)
    assert packed.shape == (3, 2, sum(bits) * 32 // 8)
    first = pack(codes[2, 32:, 0], bits[0])
    assert torch.equal(packed[2, 1, : len(first)], first)
    assert torch.equal(packed, fast.pack_ranked(codes, bits, 32))
    for unpack in (reference.unpack_ranked, fast.unpack_ranked):
        assert torch.equal(unpack(packed, bits, 32), codes)
    assert not torch.equal(reference.unpack_ranked(packed.roll(1, -1), bits, 32), codes)


@pytest.mark.parametrize("channels", [16, 64, 80])
def test_ranked_codes_are_the_references(channels: int) -> None:
    bits = Ranked(((5, 1), (3, 3), (1, 4))).bits_by_rank(channels)
    x = samples(2, 64, channels)
    slow, quick = (k.quantize_ranked(x, bits, 32) for k in (reference, fast))
    for a, b in zip(slow, quick, strict=True):
        assert (a != b).float().mean() < 1e-3  # a value on the edge of two codes, or of two ratios
    read = reference.dequantize_ranked(*slow, bits, 32, torch.float32)
    assert torch.allclose(read, fast.dequantize_ranked(*slow, bits, 32, torch.float32), atol=1e-5)
    errors = (read - x).square().mean((0, 1)) / x.var((0, 1)).clamp_min(1e-6)
    assert errors[0] < errors[-1] / 4  # more bits, less error
    assert read[..., 2].sub(3).abs().max() < 1e-3
    moments = [torch.stack([t.mean(1), t.std(1, correction=0)]) for t in (read[:, :32], x[:, :32])]
    assert torch.allclose(*moments, rtol=0.05, atol=0.02)  # a scale is stored to 4.5 %
    off = reference.dequantize_ranked(slow[0], slow[1] + 8, slow[2], bits, 32, torch.float32)
    assert (off - x).square().mean() > 4 * (read - x).square().mean()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("channels", SIZES)
def test_rotated_codes_are_the_references(bits: int, channels: int) -> None:
    x = torch.randn(2, 40, channels, generator=torch.Generator().manual_seed(0)) * 0.3
    x[0, 5] = 0
    slow, quick = reference.quantize_rotated(x, bits), fast.quantize_rotated(x, bits)
    for a, b in zip(slow, quick, strict=True):
        assert (a != b).float().mean() < 1e-3
    read = reference.dequantize_rotated(*slow, bits, torch.float32)
    assert torch.allclose(read, fast.dequantize_rotated(*slow, bits, torch.float32), atol=1e-4)
    assert read[0, 5].abs().max() < 1e-3
    kept = (read * x).sum(-1) / x.square().sum(-1).clamp_min(1e-9)
    assert kept[1].log2().abs().max() < 1 / 16 + 1e-3  # no bias, but for the step of a scale
    assert abs(kept[1].mean() - 1) < 0.01
    relative = (read - x).square().sum() / x.square().sum()
    assert relative < {2: 0.16, 3: 0.06, 4: 0.03}[bits]
    matrix = reference.hadamard(channels)
    assert torch.allclose(matrix @ matrix, torch.eye(channels), atol=1e-5)


def test_scales_are_within_their_step() -> None:
    scale = torch.logspace(-4, 4, 999)
    back = reference.decode_scale(reference.encode_scale(scale))
    assert ((back / scale).log2().abs() <= 1 / 16 + 1e-6).all()


def test_pairs_that_queries_look_at_come_first() -> None:
    keys = torch.ones(1, 64, 8)
    keys[0, ::2] = torch.tensor([1.0, 3, 1, 1, 1, 1, 1, 1])  # pair 1 varies
    power = torch.tensor([[1.0, 1, 1, 1]])
    assert _rank(keys, power)[0, 0] == 1
    keys[0, ::2, 3] = 2.0
    assert _rank(keys, power)[0].tolist()[:2] == [1, 3]
    assert _rank(keys, torch.tensor([[1.0, 1, 1, 99]]))[0].tolist()[:2] == [3, 1]


def test_the_queries_mean_square_does_not_depend_on_the_position() -> None:
    """Within a RoPE pair a rotation keeps it, so the rotated queries that the cache sees will do."""
    model = tiny_model("llama")
    layer = PackedLayer(PRESETS["kvchat2"])
    layer.lazy_initialization(torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16))
    query = torch.randn(4, 30, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = model.model.rotary_emb(query[None], torch.arange(500, 530)[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layer.observe(apply_rotary_pos_emb(query[None], query[None], cos, sin)[0][0])
    wanted = query.square().mean(1).view(2, 2, 16).mean(1).view(2, 2, 8).mean(1)
    assert torch.allclose(layer.query_power, wanted, atol=1e-4)
    before = layer.query_power
    layer.observe(query * 7)
    assert layer.query_power is before  # of the first chunk alone


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "glm4"])
def test_planned_bytes_are_measured_bytes(name: str, family: str) -> None:
    loaded = tiny_loaded(family)
    cache = KVCache(loaded.model, PRESETS[name])
    for start, count in ((0, 100), (100, 500), (600, 37)):
        forward(loaded.model, cache, tokens(count, seed=start))
        cache.seal()
        planned = usage(loaded.shape, PRESETS[name], start + count, 4).in_use
        assert cache.nbytes == planned


def test_ours_take_what_they_say() -> None:
    for head_dim in (64, 128):
        assert PRESETS["kvchat2"].true_bits(head_dim, 2) <= 2.35
        assert PRESETS["kvchat3"].true_bits(head_dim, 2) <= 3.35
