"""Layout, quantization, attention: the reference against the paper's formulas, torch against it."""

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvchat_kernels import reference, torch_attend, torch_pack
from torch import Tensor

BITS = (2, 3, 4)
IMPLEMENTATIONS = [reference, torch_pack]
CASES = [  # tokens, channels, axis, group
    *[(128, d, "channel", g) for d in (8, 64, 80) for g in (32, 64, 128)],
    *[(5, d, "token", g) for d in (64, 128) for g in (32, 64, 128)],
    (3, 16, "token", 32),  # one group, narrower than the group size
    (7, 80, "token", 32),  # ragged last groups
    (7, 80, "token", 64),
    (7, 96, "token", 64),
    (7, 96, "token", 128),
    (1, 72, "token", 64),
]


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, shape, dtype=np.uint8))


def values(tokens: int, channels: int, dtype: torch.dtype = torch.float32, heads: int = 2) -> Tensor:
    """Keys as models make them: channels of very different sizes, some with a large offset."""
    generator = torch.Generator().manual_seed(tokens * 1000 + channels)
    x = torch.randn(heads, tokens, channels, generator=generator)
    x *= 4 ** torch.randn(channels, generator=generator)
    x[..., 1::7] += 300 * torch.randn(1, generator=generator)
    return x.to(dtype)


# --- layout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels", range(8, 129, 8))
def test_unpack_undoes_pack_to_the_bit(kernel: ModuleType, bits: int, channels: int) -> None:
    codes = random_codes((2, 3, channels), bits)
    packed = kernel.pack(codes, bits)
    assert packed.shape == (2, 3, channels * bits // 8)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, reference.pack(codes, bits))
    assert torch.equal(kernel.unpack(packed, bits), codes)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(BITS), st.integers(1, 16), st.lists(st.integers(0, 255), min_size=128, max_size=128))
def test_pack_undoes_unpack_for_any_bytes(bits: int, eighths: int, raw: list[int]) -> None:
    """Every byte is a legal row: no bit of storage is unused."""
    row = torch.tensor(raw[: eighths * bits], dtype=torch.uint8)
    for kernel in IMPLEMENTATIONS:
        assert torch.equal(kernel.pack(kernel.unpack(row, bits), bits), row)


def documented_bytes(codes: list[int], bits: int) -> list[int]:
    """README.md: field f of byte j is channel f * n + j; 3 bits: a plane of two bits, then of the third."""
    row = []
    for low, width in {2: [(0, 2)], 3: [(0, 2), (2, 1)], 4: [(0, 4)]}[bits]:
        n = len(codes) * width // 8
        for j in range(n):
            row.append(
                sum(((codes[f * n + j] >> low) % 2**width) * 2 ** (f * width) for f in range(8 // width))
            )
    return row


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels", [8, 16, 64, 80, 128])
def test_the_documented_layout_byte_by_byte(kernel: ModuleType, bits: int, channels: int) -> None:
    codes = random_codes((channels,), bits)
    assert kernel.pack(codes, bits).tolist() == documented_bytes(codes.tolist(), bits)


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
def test_the_example_of_the_readme(kernel: ModuleType) -> None:
    c = random_codes((64,), 2)
    byte = c[5] | c[16 + 5] << 2 | c[32 + 5] << 4 | c[48 + 5] << 6
    assert kernel.pack(c, 2)[5] == byte


@pytest.mark.parametrize("bits", BITS)
def test_a_plain_bit_stream_is_another_layout(bits: int) -> None:
    """Negative control: neighbours packed side by side make other bytes."""
    codes = random_codes((128,), bits).tolist()
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    stream = number.to_bytes(16 * bits, "little")
    assert sum(a != b for a, b in zip(stream, documented_bytes(codes, bits), strict=True)) > 8 * bits


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", BITS)
def test_a_flipped_bit_changes_one_channel(kernel: ModuleType, bits: int) -> None:
    codes = random_codes((64,), bits)
    packed = kernel.pack(codes, bits)
    touched = set()
    for byte in range(len(packed)):
        for bit in range(8):
            flipped = packed.clone()
            flipped[byte] ^= 1 << bit
            changed = (kernel.unpack(flipped, bits) != codes).nonzero().flatten().tolist()
            assert len(changed) == 1
            touched.add(
                (changed[0], (int(kernel.unpack(flipped, bits)[changed[0]]) ^ int(codes[changed[0]])))
            )
    assert len(touched) == 64 * bits


# --- quantization -------------------------------------------------------------------------------------------


def kivi(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    """One group by the paper's formula, scale and zero as stored: what comes back, scale, zero."""
    levels = np.float32(2**bits - 1)
    scale = np.float16((x.max() - x.min()) / levels)
    zero = np.float16(x.min())
    if scale == 0:
        return np.full_like(x, zero), scale, zero
    q = np.clip(np.rint((x - np.float32(zero)) / np.float32(scale)), 0, levels)
    return q * np.float32(scale) + np.float32(zero), scale, zero


def by_the_paper(x: Tensor, bits: int, axis: str, group: int) -> Tensor:
    """What comes back of x [heads, T, D]: every group on its own."""
    out = x.float().numpy().copy()
    for head in out:
        rows = head.T if axis == "channel" else head  # a view: writing to it writes `out`
        for row in rows:
            for start in range(0, len(row), group):
                row[start : start + group] = kivi(row[start : start + group], bits)[0]
    return torch.from_numpy(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "channels", "axis", "group"), CASES)
@pytest.mark.parametrize("bits", BITS)
def test_quantize_equals_the_reference_and_the_paper(
    bits: int, tokens: int, channels: int, axis: str, group: int, dtype: torch.dtype
) -> None:
    x = values(tokens, channels, dtype)
    wanted = reference.quantize(x, bits, axis, group)
    got = torch_pack.quantize(x, bits, axis, group)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    groups = (tokens // group, channels) if axis == "channel" else (tokens, math.ceil(channels / group))
    assert wanted[1].shape == wanted[2].shape == (2, *groups)
    back = torch_pack.dequantize(*got, bits, axis, group, torch.float32)
    assert torch.equal(back, reference.dequantize(*wanted, bits, axis, group, torch.float32))
    assert torch.equal(back, by_the_paper(x, bits, axis, group))


@pytest.mark.parametrize(("tokens", "channels", "axis", "group"), CASES)
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_half_a_step(bits: int, tokens: int, channels: int, axis: str, group: int) -> None:
    x = values(tokens, channels)
    codes, scale, zero = torch_pack.quantize(x, bits, axis, group)
    back = torch_pack.dequantize(codes, scale, zero, bits, axis, group, torch.float32)
    dim = 1 if axis == "channel" else 2
    s, z = (
        t.float().abs().repeat_interleave(group, dim)[:, :tokens, :channels].double() for t in (scale, zero)
    )
    # float16 moves the step (at most `levels` times over) and the zero by 2**-11 of themselves
    bound = s / 2 + (2**bits - 1) * s * 2**-11 + z * 2**-11 + 2**-24
    error = (x.double() - back.double()).abs()
    assert (error <= bound * (1 + 1e-5)).all()
    assert tokens * channels < 100 or (error > s / 4).any(), "half the bound would fail"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_dequantize_rounds_once_to_a_16_bit_type(axis: str, dtype: torch.dtype) -> None:
    packed = reference.quantize(values(64, 64), 4, axis, 32)
    got = torch_pack.dequantize(*packed, 4, axis, 32, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, reference.dequantize(*packed, 4, axis, 32, torch.float32).to(dtype))


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5, -300.25, 3001.0, 1e-9])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kernel", IMPLEMENTATIONS)
def test_a_constant_group_comes_back_as_its_constant(
    kernel: ModuleType, bits: int, axis: str, constant: float
) -> None:
    packed = kernel.quantize(torch.full((1, 32, 32), constant), bits, axis, 32)
    back = kernel.dequantize(*packed, bits, axis, 32, torch.float32)
    assert (back == float(np.float16(constant))).all()
    wanted = reference.quantize(torch.full((1, 32, 32), constant), bits, axis, 32)
    assert torch.equal(packed[0], wanted[0]), "no division by zero, whose code would be chance"


def test_quantize_takes_a_view() -> None:
    x = values(64, 160)[:, 32:, 1::2]
    for axis in ("channel", "token"):
        got, wanted = (
            f(y, 3, axis, 32) for f, y in ((torch_pack.quantize, x), (reference.quantize, x.clone()))
        )
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def wrong_group(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return codes, scale.roll(1, 1), zero.roll(1, 1)


def wrong_shift(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return codes.roll(1, 2), scale, zero


def flipped_bit(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = codes.clone()
    codes[..., 0] ^= 0b10
    return codes, scale, zero


@pytest.mark.parametrize("damage", [wrong_group, wrong_shift, flipped_bit])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", BITS)
def test_damage_shows(bits: int, axis: str, damage: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    x = values(128, 64)
    packed = torch_pack.quantize(x, bits, axis, 32)
    honest = torch_pack.dequantize(*packed, bits, axis, 32, torch.float32)
    damaged = torch_pack.dequantize(*damage(*packed), bits, axis, 32, torch.float32)
    steps = packed[1].float().repeat_interleave(32, 1 if axis == "channel" else 2)
    assert ((honest - damaged).abs() > steps).any()


# --- attention ----------------------------------------------------------------------------------------------


def qkv(share: int, dim: int, count: int, total: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(share + dim + count + total)
    return (
        3 * torch.randn(share * kv_heads, count, dim, generator=generator),
        torch.randn(kv_heads, total, dim, generator=generator),
        torch.randn(kv_heads, total, dim, generator=generator),
    )


def assert_close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def distance(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, wanted, strict=True))


MODES = [
    {},
    {"causal": True},
    {"causal": True, "window": 8},
    {"causal": True, "window": 40},
    {"softcap": 5.0},
    {"causal": True, "softcap": 5.0},
    {"causal": True, "softcap": 5.0, "window": 8},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("count", [1, 5, 33])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("share", [1, 4, 7])
def test_attention_equals_the_reference(share: int, dim: int, count: int, mode: dict) -> None:
    for total in (count, count + 1, count + 70):
        tensors = qkv(share, dim, count, total)
        wanted = reference.attention(*tensors, dim**-0.5, **mode)
        assert_close(torch_attend.attention(*tensors, dim**-0.5, **mode), wanted)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_reference_equals_a_sum_over_visible_keys(mode: dict) -> None:
    """The reference itself, by plain loops."""
    query, key, value = qkv(4, 16, 5, 19)
    output, lse = reference.attention(query, key, value, 0.3, **mode)
    for h in range(8):
        for i in range(5):
            newest = 19 - 5 + i
            last = newest if mode.get("causal") else 18
            first = max(0, newest - mode["window"] + 1) if "window" in mode else 0
            scores = [float(query[h, i].double() @ key[h // 4, s].double()) * 0.3 for s in range(19)]
            if cap := mode.get("softcap"):
                scores = [cap * math.tanh(score / cap) for score in scores]
            weights = {s: math.exp(scores[s]) for s in range(first, last + 1)}
            total = sum(weights.values())
            wanted = sum(w / total * value[h // 4, s].double() for s, w in weights.items())
            torch.testing.assert_close(output[h, i], wanted)
            assert float(lse[h, i]) == pytest.approx(math.log(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_computes_in_float32_for_16_bit_input(dtype: torch.dtype) -> None:
    tensors = tuple(t.to(dtype) for t in qkv(4, 64, 5, 40))
    assert_close(torch_attend.attention(*tensors, 0.125), reference.attention(*tensors, 0.125))


def test_attention_takes_values_narrower_than_keys() -> None:
    query, key, value = qkv(4, 64, 5, 40)
    tensors = query, key, value[..., :48]
    wanted = reference.attention(*tensors, 0.125, causal=True)
    assert_close(torch_attend.attention(*tensors, 0.125, causal=True), wanted)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {}),
        ({"causal": True, "window": 8}, {"causal": True, "window": 9}),
        ({"causal": True, "window": 8}, {"causal": True}),
        ({"softcap": 5.0}, {}),
    ],
)
def test_another_mask_is_far_off(right: dict, wrong: dict) -> None:
    tensors = qkv(4, 64, 33, 70)
    assert (
        distance(
            torch_attend.attention(*tensors, 0.125, **wrong), reference.attention(*tensors, 0.125, **right)
        )
        > 0.1
    )


def test_another_gqa_order_is_far_off() -> None:
    query, key, value = qkv(4, 64, 5, 40)
    wanted = reference.attention(query, key, value, 0.125)
    interleaved = query.reshape(2, 4, 5, 64).transpose(0, 1).reshape(8, 5, 64)
    assert distance(torch_attend.attention(interleaved, key, value, 0.125), wanted) > 0.1


@pytest.mark.parametrize("seed", range(6))
def test_merging_pieces_in_any_order_equals_the_whole(seed: int) -> None:
    generator = np.random.default_rng(seed)
    query, key, value = qkv(4, 16, 5, 97)
    whole = reference.attention(query, key, value, 0.25)
    cuts = sorted(generator.choice(np.arange(1, 97), size=seed + 1, replace=False).tolist())
    pieces = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, 97], strict=True)]
    generator.shuffle(pieces)
    state = None
    for piece in pieces:
        state = torch_attend.merge(state, torch_attend.attention(query, key[:, piece], value[:, piece], 0.25))
    assert state is not None
    assert_close(state, whole)
    exact = reference.merge([reference.attention(query, key[:, p], value[:, p], 0.25) for p in pieces])
    assert distance(exact, whole) < 1e-12
    # without the LSE weights, or with a piece counted twice
    outputs = [reference.attention(query, key[:, p], value[:, p], 0.25)[0] for p in pieces]
    assert float((torch.stack(outputs).mean(0) - whole[0]).abs().max()) > 0.05
    again = torch_attend.attention(query, key[:, pieces[0]], value[:, pieces[0]], 0.25)
    assert distance(torch_attend.merge(state, again), whole) > 1e-3


def test_merging_does_not_overflow() -> None:
    query, key, value = qkv(1, 16, 1, 20)
    pieces = [slice(0, 7), slice(7, 20)]
    state = None
    for piece in pieces:
        state = torch_attend.merge(
            state, torch_attend.attention(query * 300, key[:, piece], value[:, piece], 1.0)
        )
    assert state is not None
    torch.testing.assert_close(
        state[0].double(), reference.attention(query * 300, key, value, 1.0)[0], atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("mode", [{}, {"causal": True}, {"softcap": 5.0}], ids=str)
def test_what_lies_beside_a_piece_does_not_leak(mode: dict) -> None:
    query, key, value = qkv(4, 16, 5, 40)
    wide = [torch.full((2, 100, 32), torch.nan) for _ in range(2)]
    for buffer, part in zip(wide, (key, value), strict=True):
        buffer[:, 30:70, :16] = part
    k, v = (buffer[:, 30:70, :16] for buffer in wide)
    got = torch_attend.attention(query, k, v, 0.25, **mode)
    assert_close(got, reference.attention(query, key, value, 0.25, **mode))
    leaking = torch_attend.attention(query, wide[0][:, 29:70, :16], wide[1][:, 29:70, :16], 0.25, **mode)
    assert leaking[0].isnan().any()
