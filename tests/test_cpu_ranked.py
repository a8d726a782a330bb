"""kvchat's own formats on the CPU: loops over channel-major codes against the reference."""

import itertools
from collections.abc import Callable

import pytest
import torch
from kvchat_kernels import cpu_pack, cpu_ranked, reference_ranked, torch_ranked
from kvchat_kernels.reference_ranked import PackedRanked, PackedRotated
from test_cpu_kernels import TOLERANCE, angles, queries
from torch import Tensor

from kvchat.kv.format import PRESETS, Ranked, Rotated

GROUP = 128


def packed(
    tokens: int, dim: int, name: str = "kvchat2", heads: int = 2
) -> tuple[PackedRanked, PackedRotated]:
    generator = torch.Generator().manual_seed(tokens + dim)
    k, v = torch.randn(2, heads, tokens, dim, generator=generator)
    k[..., 1::7] = 4 * k[..., 1::7] + 6
    fmt = PRESETS[name]
    assert isinstance(fmt.keys, Ranked) and isinstance(fmt.values, Rotated)
    bits = fmt.keys.bits_by_rank(dim)
    order = torch.stack([torch.randperm(dim, generator=generator) for _ in range(heads)])
    ranked = torch_ranked.quantize_ranked(k.gather(2, order[:, None].expand_as(k)), bits, GROUP)
    return (
        PackedRanked(*ranked, order, bits, GROUP),
        PackedRotated(*torch_ranked.quantize_rotated(v, fmt.values.bits), fmt.values.bits),
    )


def error(
    query: Tensor, key: PackedRanked, value: PackedRotated, wrong: Callable | None = None, **settings: object
) -> float:
    got = cpu_ranked.attention_packed(query, key, value, query.shape[2] ** -0.5, **settings)  # type: ignore[arg-type]
    assert [t.dtype for t in got] == [torch.float32] * 2
    if wrong is not None:
        query, key, value, settings = wrong(query, key, value, settings)
    wanted = reference_ranked.attention_packed(query, key, value, query.shape[2] ** -0.5, **settings)  # type: ignore[arg-type]
    assert [t.shape for t in got] == [t.shape for t in wanted]
    return max(float((a.double() - b).abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize(
    ("name", "dim"), [("kvchat2", 16), ("kvchat2", 64), ("kvchat3", 64), ("kvchat3", 80)]
)
def test_equals_the_reference(name: str, dim: int, rope: bool) -> None:
    for tokens, (share, count) in itertools.product((128, 640), ((1, 1), (3, 1), (4, 5), (7, 19))):
        key, value = packed(tokens, dim, name)
        for softcap in (None, 5.0):
            turns = angles(tokens, dim) if rope else None
            got = error(queries(2 * share, count, dim), key, value, rope=turns, softcap=softcap)
            assert got < TOLERANCE, (tokens, share, count, softcap)


def test_one_key_head() -> None:
    key, value = packed(256, 128, heads=1)
    for count in (1, 50):
        assert error(queries(4, count, 128), key, value, rope=angles(256, 128)) < TOLERANCE


@pytest.mark.parametrize("name", ["kvchat2", "kvchat3"])
def test_codes_are_those_of_torch(name: str) -> None:
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(1, -1, 64)
    x[..., 1] += 50
    x[..., 2] = 3.0
    keys = PRESETS[name].keys
    assert isinstance(keys, Ranked)
    wide = torch.full((2, 300, 64), torch.nan)
    wide[:, :256] = x
    got = cpu_pack.quantize_ranked(wide[:, :256], keys.bits_by_rank(64), GROUP)
    wanted = torch_ranked.quantize_ranked(x, keys.bits_by_rank(64), GROUP)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a != b).float().mean() < 1e-3  # a value on the edge of two codes, or of two ratios
    other = torch_ranked.quantize_ranked(x.roll(1, 1), keys.bits_by_rank(64), GROUP)
    assert (got[0] != other[0]).float().mean() > 0.1


def next_channel(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key._replace(order=key.order.roll(2, 1)), value, settings


def next_group(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key._replace(scale=key.scale.roll(1, 1), zero=key.zero.roll(1, 1)), value, settings


def shifted(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key._replace(codes=key.codes.roll(1, 2)), value, settings


def next_value(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key, value._replace(scale=value.scale.roll(1, 1)), settings


def next_position(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key, value, settings | {"rope": angles(256, query.shape[2], first=6)}


def not_rotated_back(query: Tensor, key: PackedRanked, value: PackedRotated, settings: dict) -> tuple:
    return query, key, value._replace(codes=value.codes.roll(1, 2)), settings


@pytest.mark.parametrize(
    "wrong", [next_channel, next_group, shifted, next_value, next_position, not_rotated_back]
)
@pytest.mark.parametrize("count", [1, 50])
def test_a_wrong_one_is_far_off(wrong: Callable, count: int) -> None:
    key, value = packed(256, 64)
    assert error(queries(4, count, 64), key, value, wrong, rope=angles(256, 64)) > 100 * TOLERANCE


@pytest.mark.parametrize("count", [1, 50])
def test_what_lies_beside_the_rows_is_not_read(count: int) -> None:
    """Rows as views of larger buffers that are full of something else, and a table whose channels lie apart."""
    key, value = packed(256, 64)

    def inside(part: Tensor) -> Tensor:
        heads, rows, width = part.shape
        filler = torch.nan if part.is_floating_point() else 255
        wide = torch.full((heads, rows + 3, width), filler, dtype=part.dtype)
        wide[:, :rows] = part
        return wide[:, :rows]

    cos, sin = angles(300, 64)
    columns = tuple(t.t().contiguous().t()[:256] for t in (cos, sin))
    plain = cpu_ranked.attention_packed(queries(4, count, 64), key, value, 0.125, rope=(cos[:256], sin[:256]))
    key = key._replace(codes=inside(key.codes), scale=inside(key.scale), zero=inside(key.zero))
    value = value._replace(codes=inside(value.codes), scale=inside(value.scale))
    beside = cpu_ranked.attention_packed(queries(4, count, 64), key, value, 0.125, rope=columns)  # type: ignore[arg-type]
    for a, b in zip(plain, beside, strict=True):
        assert torch.equal(a, b)


def test_threads_do_not_change_the_result() -> None:
    key, value = packed(1280, 64)
    before = torch.get_num_threads()
    outputs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs.append(cpu_ranked.attention_packed(queries(4, 1, 64), key, value, 0.125)[1])
    torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
