"""KVQuant's formats: fast against reference, what the paper says of each part, and the calibration behind them."""

from pathlib import Path
from typing import Any

import kvchat_kernels.reference_nonuniform as reference
import kvchat_kernels.torch_nonuniform as fast
import pytest
import torch
from test_kv_cache import forward
from tiny import tiny_calibration, tiny_loaded, tokens

from kvchat.errors import KVChatError, UsageError
from kvchat.kv.cache import KVCache
from kvchat.kv.calibrate import BINS, _ends, _hidden_gradient, calibrate, codebook
from kvchat.kv.calibration import NAME, Calibration
from kvchat.kv.format import PRESETS, NonUniform, parse
from kvchat.memory import true_bits


def samples(heads: int = 3, count: int = 50, channels: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(heads, count, channels, generator=generator)
    x[1, 3, 5], x[2, 40, 0] = 30.0, -25.0
    return x + torch.linspace(-3, 3, channels)


def channel_ranges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _ends(x)[:2]
    return ((high + low) / 2)[:, None], ((high - low) / 2)[:, None]


def levels(bits: int) -> torch.Tensor:
    even = torch.linspace(-1, 1, 2**bits)
    return even.sign() * even.abs() ** 1.5


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("outliers", [0, 1, 3])
@pytest.mark.parametrize("heads", [1, 3])
def test_fast_equals_the_reference(bits: int, outliers: int, heads: int) -> None:
    x, book = samples(heads if heads == 3 else 3)[:heads], levels(bits)
    zero, radius = channel_ranges(x)
    slow, quick = (k.quantize_channels(x, zero, radius, book, bits, outliers) for k in (reference, fast))
    for a, b in zip(slow, quick, strict=True):
        assert torch.equal(a, b)
    args = (zero, radius, slow[1], slow[2], book, bits, torch.float32)
    read = reference.dequantize_nonuniform(slow[0], *args)
    assert torch.allclose(read, fast.dequantize_nonuniform(slow[0], *args), atol=1e-6)

    by_token, quick = (k.quantize_tokens(x, book, bits, outliers) for k in (reference, fast))
    for a, b in zip(by_token, quick, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    args = (*by_token[1:], book, bits, torch.float32)
    read = reference.dequantize_nonuniform(by_token[0], *args)
    assert torch.allclose(read, fast.dequantize_nonuniform(by_token[0], *args), atol=1e-6)
    shifted = fast.dequantize_nonuniform(by_token[0].roll(1, -1), *args)
    assert (shifted - x).abs().mean() > 1.5 * (read - x).abs().mean()


def test_outliers_come_back_exactly_and_spare_the_others() -> None:
    x, book = samples(), levels(3)
    for count, kept in ((1, True), (0, False)):
        codes, zero, radius, values, places = fast.quantize_tokens(x, book, 3, count)
        read = fast.dequantize_nonuniform(codes, zero, radius, values, places, book, 3, torch.float32)
        if kept:
            assert read[1, 3, 5] == x[1, 3, 5].half()
            assert read[2, 40, 0] == x[2, 40, 0].half()
        others = torch.ones(3, 16, dtype=torch.bool)
        others[1, 5] = False
        assert ((read[:, 3] - x[:, 3])[others].abs().mean() < 0.5) == kept


def test_true_bits_count_outliers_and_ranges() -> None:
    # 8 heads of 128: ten outliers a token with 16-bit places, and a 32-bit range for values
    assert PRESETS["kvquant3"].true_bits(128, 8) == pytest.approx(3 + 320 / 1024 + 16 / 1024)
    assert parse("kvquant2:outliers=0").true_bits(128, 8) == pytest.approx(2 + 16 / 1024)
    with pytest.raises(UsageError, match="codebook"):
        NonUniform(16, "token")
    for wrong in ("kvquant2:outliers=2", "kivi2:outliers=1", "kvquant2:group=32"):
        with pytest.raises(UsageError, match="cannot read|has no setting"):
            parse(wrong)


# --- codebooks ------------------------------------------------------------------------------------------------


def histogram(x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(((x + 1) / 2 * (BINS - 1)).round().long(), minlength=BINS).double()


def loss(x: torch.Tensor, book: torch.Tensor, weight: torch.Tensor | None = None) -> float:
    error = (x[:, None] - book.float()).abs().amin(1).square()
    return float((error if weight is None else error * weight).mean())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_k_means_beats_even_levels_and_heeds_weights(bits: int) -> None:
    x = (torch.randn(4000, generator=torch.Generator().manual_seed(0)) / 4).clamp(-1, 1)
    count = histogram(x)
    plain = codebook(count, count, bits, q_norm=False)
    assert (plain.diff() > 0).all()
    assert loss(x, plain) < 0.8 * loss(x, torch.linspace(-1, 1, 2**bits))
    nudged = plain + 0.03 * torch.tensor([1.0, -1.0]).repeat(2**bits // 2)
    assert loss(x, plain) < loss(x, nudged)
    weight = torch.where(x > 0.3, 50.0, 1.0)
    places = torch.linspace(-1, 1, BINS)
    weighted = codebook(count, count * torch.where(places > 0.3, 50.0, 1.0), bits, q_norm=False)
    assert loss(x, weighted, weight) < loss(x, plain, weight)
    assert loss(x, weighted) > loss(x, plain)


def test_q_norm_keeps_mean_and_deviation() -> None:
    x = (torch.randn(20000, generator=torch.Generator().manual_seed(0)) / 4 + 0.1).clamp(-1, 1)
    count = histogram(x)
    for q_norm in (False, True):
        book = codebook(count, count, 2, q_norm).float()
        plain = codebook(count, count, 2, False).float()
        read = book[(x[:, None] - plain).abs().argmin(1)]  # nearest in the codebook that was fitted
        assert abs(float(read.std() / x.std()) - 1) < 0.005 or not q_norm
        assert abs(float(read.mean() - x.mean())) < 0.005
    assert float(plain[(x[:, None] - plain).abs().argmin(1)].std()) < 0.97 * float(x.std())


# --- calibration ----------------------------------------------------------------------------------------------


def run(loaded: Any, pieces: list[list[int]]) -> dict[str, torch.Tensor]:
    steps = calibrate(loaded.model, pieces)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_ranges_are_those_of_the_keys_before_rope() -> None:
    loaded = tiny_loaded()
    pieces = [tokens(90, 1), tokens(90, 2)]
    tensors = run(loaded, pieces)
    assert loaded.model.config._attn_implementation == "kvchat"
    seen = []
    hook = loaded.model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(output.view(1, -1, 2, 16).transpose(1, 2))
    )
    with torch.no_grad():
        for piece in pieces:
            loaded.model(torch.tensor([piece]))
    hook.remove()
    keys = torch.cat([k[0, :, 1:] for k in seen], 1)  # without each piece's first token
    got = tensors["0.keys.pre"].float()
    assert torch.allclose(got[2], keys.amin(1), rtol=2e-3, atol=1e-3)
    assert torch.allclose(got[3], keys.amax(1), rtol=2e-3, atol=1e-3)
    assert (got[0] >= got[2]).all()
    assert (got[0] > got[2]).float().mean() > 0.5
    assert not torch.allclose(tensors["0.keys.post"].float(), got, atol=0.1)


def test_the_gradient_is_that_of_the_whole_loss() -> None:
    loaded = tiny_loaded()
    ids = torch.tensor(tokens(40))
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logits = loaded.model.lm_head(hidden)
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").backward()
    assert torch.allclose(_hidden_gradient(loaded.model, hidden.detach(), ids), hidden.grad, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gemma2", "glm4", "phi3"])
def test_calibrated_formats_stay_close(family: str) -> None:
    loaded = tiny_loaded(family)
    calibration = tiny_calibration(loaded.model)
    ids = tokens(200, 7)
    exact = forward(loaded.model, KVCache(loaded.model, parse("fp16:k=32,v=32")), ids[:150])
    cache = KVCache(loaded.model, parse("fp16:k=32,v=32"))
    forward(loaded.model, cache, ids[:150])
    exact = forward(loaded.model, cache, ids[150:])
    errors = []
    for name in ("kvquant4", "kvquant3", "kvquant2"):
        cache = KVCache(loaded.model, PRESETS[name], calibration)
        forward(loaded.model, cache, ids[:150])
        errors.append(float((forward(loaded.model, cache, ids[150:]) - exact).square().mean()))
    assert errors[0] < 0.7 * min(errors[1:])
    assert errors[0] < 0.5 * float(exact.var())


def test_without_a_calibration_it_is_refused() -> None:
    with pytest.raises(KVChatError, match="kvquant2 needs a calibration.*kvchat calibrate"):
        KVCache(tiny_loaded().model, PRESETS["kvquant2"])


def test_a_calibration_on_disk(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    calibration = tiny_calibration(loaded.model)
    path = tmp_path / NAME
    assert Calibration.read(path) is None
    calibration.write(path)
    again = Calibration.read(path)
    assert again is not None
    assert again.digest == calibration.digest
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert again.recipe == calibration.recipe
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(KVChatError, match="cannot be read.*remove it"):
        Calibration.read(path)
    with pytest.raises(KVChatError, match="cannot be written"):
        calibration.write(tmp_path / "missing" / NAME)


def test_the_same_pieces_give_the_same_calibration() -> None:
    assert tiny_calibration(tiny_loaded().model).digest == tiny_calibration(tiny_loaded().model).digest


def test_bits_on_the_default_models_shape() -> None:
    shape = tiny_loaded().shape
    assert true_bits(shape, parse("kvquant2")) > true_bits(shape, parse("kvquant2:outliers=0"))
