"""The GPU's kernels in Triton's interpreter on the CPU, against the reference.

The interpreter runs the same source, but for the unpacking in PTX: benchmarks/gpu.py checks that on a GPU.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # has no wheel for macOS

from kvchat_kernels import reference, torch_pack, triton_attend, triton_pack, triton_step
from kvchat_kernels.reference import Packed
from kvchat_kernels.triton_attend import Plan

TOLERANCE = 1e-2
"""Of outputs and of LSE: queries, weights and scaled queries are rounded to float16. Wrong inputs are off by ten times that."""


@dataclass(frozen=True)
class Case:
    bits: tuple[int, int] = (2, 2)
    dim: int = 64
    kv_heads: int = 2
    share: int = 2
    count: int = 1
    length: int = 128
    groups: tuple[int, int] = (32, 32)
    split: int = 64
    rope: bool = False
    softcap: float | None = None
    block_m: int = 16
    block_n: int = 32

    def tensors(self) -> tuple[Tensor, Packed, Packed, tuple[Tensor, Tensor] | None]:
        generator = torch.Generator().manual_seed(self.dim + self.length)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        query = normal(self.kv_heads * self.share, self.count, self.dim)
        key = normal(self.kv_heads, self.length, self.dim) * normal(self.dim).mul(0.5).exp()
        key[..., 1::7] += 20 * normal(1)  # as the keys of a model with biases
        value = normal(self.kv_heads, self.length, self.dim)
        packed = []
        for x, bits, axis, group in zip(
            (key, value), self.bits, ("channel", "token"), self.groups, strict=True
        ):
            parts = torch_pack.quantize(x, bits, axis, group)
            packed.append(Packed(*(view(part) for part in parts), bits, axis, group))
        rope = None
        if self.rope:
            angle = torch.outer(torch.arange(self.length) + 3.0, 0.5 ** torch.arange(self.dim // 2)).repeat(
                1, 2
            )
            rope = angle.cos(), angle.sin()
        return query, packed[0], packed[1], rope

    @property
    def plan(self) -> Plan:
        return Plan(self.block_m, self.block_n, self.split, 1, 1)


def view(part: Tensor) -> Tensor:
    """The same rows in the middle of a larger buffer, in which all else is NaN, or ones where there is no NaN."""
    fill = 255 if part.dtype == torch.uint8 else torch.nan
    wide = torch.full((part.shape[0] + 1, part.shape[1] + 7, part.shape[2]), fill, dtype=part.dtype)
    inner = wide[1:, 3:-4]
    inner.copy_(part)
    return inner


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN before a kernel is launched, so that one it leaves out is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 85)

    monkeypatch.setattr(torch, "empty", poisoned)


def distance(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    assert all(g.dtype == torch.float32 and g.shape == w.shape for g, w in zip(got, wanted, strict=True))
    worst = max(float((g - w).abs().max()) for g, w in zip(got, wanted, strict=True))
    return worst if worst == worst else float("inf")


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    monkeypatch.setattr(triton_attend, "plan", lambda *_: case.plan)
    query, key, value, rope = case.tensors()
    scaling = case.dim**-0.5
    got = triton_attend.attention_packed(query, key, value, scaling, rope=rope, softcap=case.softcap)
    wanted = reference.attention_packed(query, key, value, scaling, rope=rope, softcap=case.softcap)
    return got, wanted


CASES = [
    *[Case((bits, bits), dim) for bits in (2, 3, 4) for dim in (64, 80, 96, 128, 256)],
    *[Case((bits, bits), 128, groups=g) for bits in (2, 3, 4) for g in ((64, 128), (128, 64))],
    *[Case((bits, bits), dim, 1, rope=True) for bits in (2, 3, 4) for dim in (64, 80, 128)],
    *[Case((a, b)) for a, b in ((4, 2), (2, 3), (3, 4))],
    *[Case(share=share, kv_heads=kv, count=count) for share, kv, count in ((1, 3, 1), (7, 2, 1), (8, 1, 3))],
    *[Case(length=length, split=split) for length in (32, 96, 160) for split in (32, 64, 1024)],
    *[
        Case(length=224, split=split, block_n=n, bits=(3, 4))
        for n, split in ((64, 96), (128, 128), (64, 1024))
    ],
    Case(share=4, count=20, block_m=64),
    Case(softcap=3.0),
    Case(softcap=3.0, rope=True, bits=(4, 4)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(*run(case, monkeypatch)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_16_bit_queries(dtype: torch.dtype) -> None:
    query, key, value, _ = Case().tensors()
    got = triton_attend.attention_packed(query.to(dtype), key, value, 0.125)
    assert distance(got, reference.attention_packed(query.to(dtype), key, value, 0.125)) < TOLERANCE


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_neither_large_nor_small_numbers_leave_float16(size: float) -> None:
    """Queries, keys and values as far from 1 as models have them; the scores stay the same."""
    query, key, value, _ = Case().tensors()
    key, value = (
        p._replace(scale=(p.scale.float() * size).half(), zero=(p.zero.float() * size).half())
        for p in (key, value)
    )
    output, lse = triton_attend.attention_packed(query / size, key, value, 0.125)
    wanted, wanted_lse = reference.attention_packed(query / size, key, value, 0.125)
    assert distance((output / size, lse), (wanted / size, wanted_lse)) < TOLERANCE


def test_scores_far_apart_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest score comes last, so that what was summed before must fade."""
    query, key, value, _ = Case(length=160).tensors()
    key.zero[:, -1] = query[:, 0].view(2, 2, 64).mean(1) * 4
    monkeypatch.setattr(triton_attend, "plan", lambda *_: Plan(16, 32, 1024, 1, 1))
    got = triton_attend.attention_packed(query, key, value, 0.3)
    assert distance(got, reference.attention_packed(query, key, value, 0.3)) < TOLERANCE


# --- what must be seen: each of these is far off ------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_wrong_shift_is_far_off(bits: int, which: str) -> None:
    query, key, value, _ = Case((bits, bits)).tensors()
    got = triton_attend.attention_packed(query, key, value, 0.125)
    wrong = {"key": key, "value": value}
    codes = torch_pack.unpack(wrong[which].codes, bits)
    wrong[which] = wrong[which]._replace(codes=torch_pack.pack(codes >> 1, bits))
    assert (
        distance(got, reference.attention_packed(query, wrong["key"], wrong["value"], 0.125)) > 10 * TOLERANCE
    )


@pytest.mark.parametrize("name", ["codes", "scale", "zero"])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("axis", [1, 2])
def test_a_neighbouring_token_or_channel_is_far_off(name: str, which: str, axis: int) -> None:
    query, key, value, _ = Case(dim=128).tensors()
    got = triton_attend.attention_packed(query, key, value, 0.0884)
    wrong = {"key": key, "value": value}
    wrong[which] = wrong[which]._replace(**{name: getattr(wrong[which], name).roll(1, axis)})
    assert (
        distance(got, reference.attention_packed(query, wrong["key"], wrong["value"], 0.0884)) > 3 * TOLERANCE
    )


def test_a_position_off_by_one_is_far_off() -> None:
    query, key, value, rope = replace(Case(), rope=True).tensors()
    assert rope is not None
    cos, sin = rope
    got = triton_attend.attention_packed(query, key, value, 0.125, rope=(cos, sin))
    wrong = reference.attention_packed(query, key, value, 0.125, rope=(cos.roll(1, 0), sin.roll(1, 0)))
    assert distance(got, wrong) > 10 * TOLERANCE


# --- packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "dim", "axis", "group"),
    [
        (64, 64, "channel", 32),
        (128, 80, "channel", 64),
        (128, 128, "channel", 128),
        (3, 64, "token", 32),
        (5, 80, "token", 32),
        (5, 96, "token", 64),
        (33, 128, "token", 128),
        (2, 256, "token", 32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packs_to_the_bit(
    bits: int, tokens: int, dim: int, axis: str, group: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, tokens, dim, generator=generator) * torch.randn(dim, generator=generator).mul(2).exp()
    x[..., 3::9] += 100
    x[:, :, 5] = 7.0  # groups without a range
    x = x.to(dtype)
    inner = view(x)
    for got, wanted in zip(
        triton_pack.quantize(inner, bits, axis, group), torch_pack.quantize(x, bits, axis, group), strict=True
    ):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "dim", "axis", "group"),
    [
        (64, 64, "channel", 32),
        (128, 80, "channel", 64),
        (33, 96, "token", 64),
        (5, 80, "token", 32),
        (2, 256, "token", 128),
    ],
)
def test_unpacks_what_was_packed(bits: int, tokens: int, dim: int, axis: str, group: int) -> None:
    x = torch.randn(2, tokens, dim, generator=torch.Generator().manual_seed(dim))
    parts = tuple(view(part) for part in torch_pack.quantize(x, bits, axis, group))
    wanted = reference.dequantize(*parts, bits, axis, group, torch.float32)
    got = triton_pack.dequantize(*parts, bits, axis, group, torch.float32)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    half = triton_pack.dequantize(*parts, bits, axis, group, torch.bfloat16)
    torch.testing.assert_close(half, wanted.bfloat16())
    shifted = parts[0].roll(1, 2), *parts[1:]
    assert (
        float((triton_pack.dequantize(*shifted, bits, axis, group, torch.float32) - wanted).abs().max()) > 0.1
    )


# --- one step -----------------------------------------------------------------------------------------------------


def step_case(
    case: Case, packed: int, newest: int, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Packed, Packed, tuple[Tensor, Tensor], Tensor, float], dict[str, object]]:
    query, key, value, rope = case.tensors()
    generator = torch.Generator().manual_seed(newest)
    dense = torch.randn(2, case.kv_heads, 100, case.dim, generator=generator)
    dense[:, :, newest:] = torch.nan  # room for tokens that are not there yet
    counts = torch.tensor([packed, newest])
    query, keys, values = (x.to(dtype) for x in (query, *dense))
    return (query, key, value, (keys, values), counts, case.dim**-0.5), {
        "rope": rope,
        "softcap": case.softcap,
    }


@pytest.mark.parametrize(
    ("case", "packed", "newest"),
    [
        (Case(length=192), 192, 100),
        (Case(length=192), 64, 1),
        (Case((3, 2), 80, share=1, length=256), 160, 64),
        (Case((4, 4), 128, 1, share=7, length=192, rope=True), 96, 65),
        (Case(share=20, length=192, softcap=3.0), 128, 33),
    ],
    ids=str,
)
def test_a_step_equals_the_reference(
    case: Case, packed: int, newest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_m = 32 if case.share > 16 else 16
    monkeypatch.setattr(triton_attend, "plan", lambda *_: replace(case, block_m=block_m).plan)
    args, settings = step_case(case, packed, newest)
    got = triton_step.attention_step(*args, **settings)
    wanted = reference.attention_step(*args, **settings)
    assert got.dtype == torch.float32 and got.shape == wanted.shape
    assert float((got - wanted).abs().max()) < TOLERANCE


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_with_a_token_too_few_is_far_off(which: int) -> None:
    args, settings = step_case(Case(length=192), 128, 3)
    wanted = triton_step.attention_step(*args, **settings)
    args[4][which] -= 32 if which == 0 else 1
    assert float((triton_step.attention_step(*args, **settings) - wanted).abs().max()) > TOLERANCE


def test_a_step_takes_16_bit_numbers() -> None:
    # the interpreter multiplies bfloat16's bits; benchmarks/gpu_model.py runs in it
    args, settings = step_case(Case(length=192), 128, 3, torch.float16)
    got, wanted = triton_step.attention_step(*args, **settings), reference.attention_step(*args, **settings)
    assert float((got - wanted).abs().max()) < TOLERANCE
