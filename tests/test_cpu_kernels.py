"""Attention over packed rows on the CPU, against the reference."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kvchat_kernels import cpu_attend, cpu_loops, reference, torch_pack
from kvchat_kernels.reference import Packed
from numba import njit
from torch import Tensor

Rope = tuple[Tensor, Tensor]
TOLERANCE = 3e-5


def packed(
    tokens: int, dim: int, bits: tuple[int, int] = (2, 2), groups: tuple[int, int] = (32, 32), heads: int = 2
) -> tuple[Packed, Packed]:
    """Keys with channels of very different sizes, and values."""
    generator = torch.Generator().manual_seed(tokens + dim)
    k, v = torch.randn(2, heads, tokens, dim, generator=generator)
    k[..., 1::7] = 4 * k[..., 1::7] + 6
    return (
        Packed(*torch_pack.quantize(k, bits[0], "channel", groups[0]), bits[0], "channel", groups[0]),
        Packed(*torch_pack.quantize(v, bits[1], "token", groups[1]), bits[1], "token", groups[1]),
    )


def queries(heads: int, count: int, dim: int) -> Tensor:
    return torch.randn(heads, count, dim, generator=torch.Generator().manual_seed(heads * count))


def angles(tokens: int, dim: int, first: int = 5) -> Rope:
    """cos and sin, those of YaRN's kind: scaled, so that a swapped one shows."""
    turns = torch.arange(first, first + tokens)[:, None] * 100.0 ** (-torch.arange(dim // 2) / (dim / 2))
    turns = torch.cat([turns, turns], 1)
    return 1.2 * turns.cos(), 1.2 * turns.sin()


def error(
    query: Tensor,
    key: Packed,
    value: Packed,
    *,
    wrong: Callable[..., tuple] | None = None,
    **settings: object,
) -> float:
    """The largest difference to the reference, whose input may first be made `wrong`."""
    got = cpu_attend.attention_packed(query, key, value, query.shape[2] ** -0.5, **settings)  # type: ignore[arg-type]
    assert [t.dtype for t in got] == [torch.float32] * 2
    if wrong is not None:
        query, key, value, settings = wrong(query, key, value, settings)
    wanted = reference.attention_packed(query, key, value, query.shape[2] ** -0.5, **settings)  # type: ignore[arg-type]
    assert [t.shape for t in got] == [t.shape for t in wanted]
    return max(float((a.double() - b).abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_equals_the_reference(bits: int, dim: int, rope: bool) -> None:
    """Lengths about a split's, few queries (loops) and many (torch's products), with and without a softcap."""
    for tokens, (share, count) in itertools.product((32, 544, 1056), ((1, 1), (3, 1), (4, 5), (7, 19))):
        key, value = packed(tokens, dim, (bits, bits))
        for softcap in (None, 5.0):
            got = error(
                queries(2 * share, count, dim),
                key,
                value,
                rope=angles(tokens, dim) if rope else None,
                softcap=softcap,
            )
            assert got < TOLERANCE, (tokens, share, count, softcap)


@pytest.mark.parametrize(("bits", "dim"), [((2, 2), 8), ((3, 2), 72), ((4, 3), 96), ((2, 4), 128)], ids=str)
def test_any_head_dim_and_bits(bits: tuple[int, int], dim: int) -> None:
    key, value = packed(96, dim, bits)
    for count, rope in ((1, None), (50, angles(96, dim))):
        assert error(queries(4, count, dim), key, value, rope=rope) < TOLERANCE


@pytest.mark.parametrize("groups", [(32, 64), (64, 32), (128, 128)], ids=str)
def test_any_group(groups: tuple[int, int]) -> None:
    """Also one that ends within a head, and one that is wider than it."""
    key, value = packed(1024 + groups[0], 80, (2, 2), groups)
    for count in (1, 50):
        assert error(queries(6, count, 80), key, value) < TOLERANCE


@pytest.mark.parametrize("count", [1, 2, 8, 32, 33, 100, 512])
def test_any_number_of_queries(count: int) -> None:
    key, value = packed(2080, 16)
    assert error(queries(4, count, 16), key, value) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_a_16_bit_type(dtype: torch.dtype) -> None:
    assert error(queries(4, 3, 64).to(dtype), *packed(64, 64)) < TOLERANCE


# --- wrong input is far off ---------------------------------------------------------------------------------


def shifted(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key._replace(codes=key.codes.roll(1, 2)), value, settings


def shifted_value(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key, value._replace(codes=value.codes.roll(1, 2)), settings


def next_group(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key._replace(scale=key.scale.roll(1, 1), zero=key.zero.roll(1, 1)), value, settings


def next_token(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key, value._replace(scale=value.scale.roll(1, 1), zero=value.zero.roll(1, 1)), settings


def next_position(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key, value, {**settings, "rope": angles(key.codes.shape[1], query.shape[2], first=6)}


def interleaved_heads(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1), key, value, settings


def no_softcap(query: Tensor, key: Packed, value: Packed, settings: dict) -> tuple:
    return query, key, value, {**settings, "softcap": None}


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize(
    "wrong",
    [shifted, shifted_value, next_group, next_token, next_position, interleaved_heads, no_softcap],
)
def test_what_is_wrong_shows(wrong: Callable[..., tuple], count: int) -> None:
    key, value = packed(544, 64, (3, 3))
    settings = {"rope": angles(544, 64), "softcap": 5.0}
    query = queries(8, count, 64)
    assert error(query, key, value, **settings) < TOLERANCE
    assert error(query, key, value, wrong=wrong, **settings) > 1000 * TOLERANCE


# --- what lies beside the rows, who computes them -----------------------------------------------------------


def amid(part: Tensor, before: int, after: int, head: int) -> Tensor:
    """The same rows as a view of a larger buffer, with NaN (or garbage) around them."""
    heads, rows, width = part.shape
    fill = torch.nan if part.is_floating_point() else 255
    buffer = torch.full((heads + 2 * head, before + rows + after, width), fill, dtype=part.dtype)
    view = buffer[head : head + heads, before : before + rows]
    view.copy_(part)
    return view


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
def test_rows_in_a_larger_buffer_give_the_same_to_the_bit(rope: bool, count: int) -> None:
    for dim, bits in ((64, 2), (80, 3), (16, 4)):
        query, turns = queries(4, count, dim), angles(544, dim) if rope else None
        plain = packed(544, dim, (bits, bits))
        wanted = cpu_attend.attention_packed(query, *plain, 0.2, rope=turns)
        for before, after, head in ((0, 480, 0), (3, 1, 1), (1, 0, 0)):
            views = [
                p._replace(
                    **{n: amid(getattr(p, n), before, after, head) for n in ("codes", "scale", "zero")}
                )
                for p in plain
            ]
            got = cpu_attend.attention_packed(query, *views, 0.2, rope=turns)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            # negative control: the row beside them is another history
            assert before == 0 or torch.isnan(views[0].scale.as_strided((1,), (1,), 0)).all()


def test_rows_that_do_not_lie_side_by_side() -> None:
    key, value = packed(64, 64)
    spread = [
        p._replace(**{n: getattr(p, n).repeat_interleave(2, 2)[..., ::2] for n in ("codes", "scale", "zero")})
        for p in (key, value)
    ]
    assert error(queries(4, 1, 64), *spread) < TOLERANCE


@pytest.mark.parametrize("count", [1, 50])
def test_the_number_of_threads_changes_no_bit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, (key, value) = queries(6, count, 64), packed(2080, 64)
    results = []
    for threads in (1, 2, 3, 7, 100):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(cpu_attend.attention_packed(query, key, value, 0.125))
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, results[0], strict=True))


def test_what_is_not_packed_as_kivi_is_refused() -> None:
    key, value = packed(64, 64)
    for wrong in ((value, key), (key, key), (value, value)):
        with pytest.raises(ValueError, match="keys go by channel"):
            cpu_attend.attention_packed(queries(4, 1, 64), *wrong, 0.125)


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 50])
def test_large_scores_do_not_overflow_and_nan_stays(count: int) -> None:
    key, value = packed(1056, 64)
    got, lse = cpu_attend.attention_packed(300 * queries(4, count, 64), key, value, 1.0)
    wanted = reference.attention_packed(300 * queries(4, count, 64), key, value, 1.0)
    torch.testing.assert_close(got.double(), wanted[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=0)
    key.zero[0, 3, 0] = torch.nan
    broken = cpu_attend.attention_packed(queries(4, count, 64), key, value, 1.0)[0]
    assert broken[:2].isnan().all()
    assert not broken[2:].isnan().any()


def test_halves_of_every_bit_pattern() -> None:
    half = cpu_loops._half

    @njit
    def convert(bits, out):  # type: ignore[no-untyped-def]
        for i in range(bits.shape[0]):
            out[i] = half(bits[i])

    bits, out = np.arange(65536).astype(np.uint16), np.empty(65536, np.float32)
    convert(bits, out)
    assert np.array_equal(out, bits.view(np.float16).astype(np.float32), equal_nan=True)


def test_exp() -> None:
    exp = cpu_loops._exp

    @njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
    def convert(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.shape[0]):
            out[i] = exp(x[i])

    x = np.linspace(-87, 88, 500_001).astype(np.float32)
    out = np.empty_like(x)
    convert(x, out)
    wanted = np.exp(x.astype(np.float64))
    assert np.abs(out / wanted - 1).max() < 3e-7
    convert(np.array([0, -200, -np.inf, np.nan], np.float32), out)
    assert out[0] == 1
    assert (out[1:3] < 1e-37).all()
    assert np.isnan(out[3])
