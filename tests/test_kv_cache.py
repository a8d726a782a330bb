"""What a packed cache holds and costs, what is built while it is read, and that it goes back exactly."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvchat_kernels import cpu_attend, cpu_ranked, torch_attend
from tiny import tiny_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, DynamicCache

from kvchat.errors import KVChatError, ModelRefused
from kvchat.kv import attention, ops
from kvchat.kv.cache import KVCache
from kvchat.kv.format import Quant, parse
from kvchat.kv.layer import PackedLayer
from kvchat.kv.rope import GROWTH
from kvchat.kv.rows import PackedRows

SPECS = [
    "kivi2",
    "kivi3",
    "kivi4",
    "kivi3:k=4,v=2",
    "kivi2:group=64,window=32",
    "kivi4:group=128,window=0",
    "kivi2:sink=5",
    "kivi3:sink=5,window=0",
    "kivi2:k=2,v=4,kgroup=64,vgroup=32,window=32,sink=3",
    "kivi2:v=16",
    "kivi2:k=16,window=32",
    "fp16",
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.kv.layer.TILE", 128)


def served(family: str = "llama", **settings: Any) -> Any:
    attention.register()
    model = tiny_model(family, **settings)
    model.set_attn_implementation(attention.NAME)
    return model


@torch.no_grad()
def forward(model: Any, cache: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def fill(model: Any, cache: KVCache, ids: list[int], chunk: int = 100) -> KVCache:
    for start in range(0, len(ids), chunk):
        forward(model, cache, ids[start : start + chunk])
    return cache


def packed_layers(cache: KVCache) -> list[PackedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, PackedLayer)]


def held(cache: KVCache) -> list[Tensor]:
    """All keys and values, as attention reads them."""
    tensors: list[Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            tiles = list(layer.tiles())
            tensors += [torch.cat([tile[i] for tile in tiles], 1) for i in (1, 2)]
        else:
            tensors += [layer.keys[0], layer.values[0]]
    return tensors


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- what is stored -----------------------------------------------------------------------------------------


def by_the_paper(x: np.ndarray, quant: Quant) -> np.ndarray:
    """x [heads, T, D] after storage: every group by KIVI's formula, or rounded to float16."""
    if not quant.packed:
        return x.astype(np.float16 if quant.bits == 16 else np.float32).astype(np.float32)
    out = x.copy()
    levels = np.float32(2**quant.bits - 1)
    for head in out:
        for row in head.T if quant.axis == "channel" else head:
            for start in range(0, len(row), quant.group):
                group = row[start : start + quant.group]
                zero = np.float32(np.float16(group.min()))
                scale = np.float32(np.float16((group.max() - group.min()) / levels))
                assert scale > 0
                group[:] = np.clip(np.rint((group - zero) / scale), 0, levels) * scale + zero
    return out


@pytest.fixture
def produced(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """The exact keys and values that the model gave each layer, by the layer's id."""
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    update = PackedLayer.update

    def recording(layer: PackedLayer, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.setdefault(id(layer), []).append((keys[0].clone(), values[0].clone()))
        return update(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(PackedLayer, "update", recording)
    return seen


@pytest.mark.parametrize("count", [300, 333])
@pytest.mark.parametrize("spec", SPECS)
def test_tiles_hold_the_papers_formula(spec: str, count: int, produced: dict) -> None:
    model, fmt = served(head_dim=80), parse(spec)
    cache = fill(model, KVCache(model, fmt), tokens(count), 70)
    cache.seal()
    for layer in packed_layers(cache):
        exact = [torch.cat(parts, 1).numpy() for parts in zip(*produced[id(layer)], strict=True)]
        block = max([32] + [q.group for q in (fmt.keys, fmt.values) if q.packed and q.axis == "channel"])
        packed = (count - fmt.window - fmt.sink) // block * block
        assert layer.packed_tokens == packed > 0
        inside = slice(fmt.sink, fmt.sink + packed)
        for i, quant in ((0, fmt.keys), (1, fmt.values)):
            wanted = exact[i].copy()
            wanted[:, inside] = by_the_paper(wanted[:, inside], quant)
            tiles = list(layer.tiles())
            got = torch.cat([tile[i + 1] for tile in tiles], 1).numpy()
            assert np.array_equal(got, wanted)
            if quant.packed:
                later = by_the_paper(np.roll(exact[i], 1, axis=1)[:, inside], quant)
                assert np.abs(got[:, inside] - later).max() > 0.5, "groups that start one token off"
        starts = [start for start, _, _ in tiles]
        assert starts == [
            *([0] if fmt.sink else []),
            *range(fmt.sink, fmt.sink + packed, 128),
            fmt.sink + packed,
        ]


def test_keys_before_rope_are_what_the_projection_made(produced: dict) -> None:
    model, fmt = served(), parse("kivi4:window=32,sink=3,rope=pre")
    projected: list[Tensor] = []
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda *args: projected.append(args[2][0])
    )
    cache = fill(model, KVCache(model, fmt), tokens(300))
    cache.seal()
    hook.remove()
    layer = packed_layers(cache)[0]
    packed = layer.packed_tokens
    unrotated = torch.cat(projected).view(300, 2, 16).transpose(0, 1)[:, 3 : 3 + packed]
    wanted = torch.from_numpy(by_the_paper(unrotated.numpy(), fmt.keys))
    stored = layer.rows[0].read(0, packed)
    # un-rotation rounds, so that a value on the edge between two codes may fall to the other one
    assert ((stored - wanted).abs() > 1e-2).float().mean() < 0.002
    rotated = torch.cat([keys for keys, _ in produced[id(layer)]], 1)[:, 3 : 3 + packed]
    assert ((stored - rotated).abs() > 1e-2).float().mean() > 0.5
    read = torch.cat([keys for _, keys, _ in layer.tiles()], 1)[:, 3 : 3 + packed]
    step = float(layer.rows[0].stored(0, packed)[1].float().max())
    assert float((read - rotated).norm(dim=-1).max()) < step * 16**0.5
    assert layer.starts == list(range(3, 3 + packed, 32)), "blocks carry positions, the sink's included"


def test_constant_keys_and_values_are_no_division_by_zero() -> None:
    layer = PackedLayer(parse("kivi2:window=0"))
    constant = torch.full((1, 2, 64, 16), 3.25)
    layer.update(constant, -constant)
    layer.flush()
    _, keys, values = next(layer.tiles())
    assert layer.packed_tokens == 64
    assert (keys == 3.25).all() and (values == -3.25).all()


@pytest.mark.parametrize("window", [0, 32, 128])
def test_a_chunk_sees_itself_exactly(window: int) -> None:
    """One chunk is attended to before any of it is packed, so it answers as stock attention does."""
    model = served()
    got = forward(model, KVCache(model, parse(f"kivi2:window={window}")), tokens(300))
    model.set_attn_implementation("eager")
    torch.testing.assert_close(got, forward(model, DynamicCache(), tokens(300)), atol=1e-3, rtol=1e-3)


def test_the_window_is_exact_to_its_last_token() -> None:
    model = served()
    for window, packed in ((50, 0), (49, 0), (18, 32), (17, 32), (19, 0)):
        cache = fill(model, KVCache(model, parse(f"kivi2:window={window}")), tokens(50))
        cache.seal()
        assert packed_layers(cache)[0].packed_tokens == packed


# --- what is never built ------------------------------------------------------------------------------------


class LargestFloat(TorchDispatchMode):
    """Records the most elements of any float tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.most = max(self.most, tensor.numel())
        return result


LONG, CHUNK, HEADS, HEAD_DIM = 3000, 64, 4, 16
DENSE_HISTORY = LONG * 2 * HEAD_DIM  # of one layer's keys


def long_model() -> Any:
    return served(max_position_embeddings=LONG, num_hidden_layers=2)


@pytest.mark.parametrize(
    "spec", ["kivi2", "kivi4:window=32,sink=4", "kivi3:group=128,window=0", "kivi4:rope=pre", "kvchat2"]
)
def test_nothing_dense_is_larger_than_a_tile_or_the_window(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fmt = long_model(), parse(spec)
    longest = {"keys": 0}
    attend = ops.attention

    def recorded_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        longest["keys"] = max(longest["keys"], key.shape[1], value.shape[1])
        return attend(query, key, value, *args, **settings)

    for module in (ops, torch_attend):  # which the kernel over packed rows calls
        monkeypatch.setattr(module, "attention", recorded_attention)
    for module in (cpu_attend, cpu_ranked):
        monkeypatch.setattr(module, "TILE", 128)
    monkeypatch.setattr(attention, "LONG", 1)
    cache = KVCache(model, fmt)
    cache.reserve(LONG)
    with LargestFloat() as largest:
        fill(model, cache, tokens(LONG - 2), CHUNK)
        fill(model, cache, tokens(2), 1)
    loose = fmt.window + fmt.block + CHUNK
    assert 128 <= longest["keys"] <= max(128, loose)
    # keys for every query head, or the scores of a chunk over what it looks at in one go
    limit = max(128, loose) * HEADS * max(HEAD_DIM, CHUNK)
    assert limit < DENSE_HISTORY
    if fmt.pre_rope and fmt.fused:  # cos and sin of every position, one table for all layers
        limit = 2 * (LONG + GROWTH) * HEAD_DIM
    assert largest.most <= limit


def test_the_recorder_sees_a_dense_history() -> None:
    model = long_model()
    model.set_attn_implementation("eager")
    with LargestFloat() as largest:
        fill(model, DynamicCache(), tokens(LONG), CHUNK)  # type: ignore[arg-type]
    assert largest.most >= DENSE_HISTORY


def test_packed_history_is_never_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    cache = KVCache(model, parse("kivi3:window=32,sink=2"))
    appended: dict[int, list[int]] = {}
    append, read = PackedRows.append, PackedRows.read
    reads: list[int] = []

    def recorded(rows: PackedRows, at: int, x: Tensor) -> None:
        ends = appended.setdefault(id(rows), [0])
        assert at == ends[-1], "exactly where the last block ended"
        ends.append(at + x.shape[1])
        before = len(reads)
        append(rows, at, x)
        assert len(reads) == before, "packing reads nothing back"

    def recorded_read(rows: PackedRows, start: int, stop: int) -> Tensor:
        reads.append(start)
        return read(rows, start, stop)

    monkeypatch.setattr(PackedRows, "append", recorded)
    monkeypatch.setattr(PackedRows, "read", recorded_read)
    old: list[tuple[PackedRows, int, list[Tensor]]] = []
    for start in range(0, 600, 50):
        forward(model, cache, tokens(50, seed=start))
        for rows, length, parts in old:
            assert same(rows.stored(0, length), parts)
        old += [
            (rows, layer.packed_tokens, [part.clone() for part in rows.stored(0, layer.packed_tokens)])
            for layer in packed_layers(cache)
            for rows in layer.rows
        ]
    assert len(appended) == 8
    assert all(ends[-1] > 400 for ends in appended.values())


def test_what_is_reserved_but_unused_is_never_read() -> None:
    model = served()
    fmt = parse("kivi2:window=32")
    cache = KVCache(model, fmt)
    cache.reserve(600)
    clean = KVCache(model, fmt)
    poisoned = False
    for start in range(0, 300, 50):
        for layer in packed_layers(cache):
            if layer.is_initialized:
                poisoned = True
                for rows in layer.rows:
                    for buffer, field in zip(rows._buffers, rows.fields, strict=True):
                        free = buffer[:, layer.packed_tokens // field.tokens :]
                        assert free.numel()
                        free.fill_(255 if buffer.dtype == torch.uint8 else torch.nan)
        ids = tokens(50, seed=start)
        assert torch.equal(forward(model, cache, ids), forward(model, clean, ids))
    assert poisoned


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "bits"), [("kivi2", 3.0), ("kivi3", 4.0), ("kivi4", 5.0)])
def test_true_bits_measured_from_the_packed_bytes_alone(preset: str, bits: float) -> None:
    model = served(head_dim=64, num_hidden_layers=1)
    cache = fill(model, KVCache(model, parse(preset)), tokens(500))
    layer = packed_layers(cache)[0]
    assert layer.packed_tokens > 200
    elements = 2 * 2 * 64 * layer.packed_tokens
    assert sum(rows.nbytes(layer.packed_tokens) for rows in layer.rows) * 8 / elements == bits


def test_reserving_means_that_nothing_is_allocated_later() -> None:
    model = served()
    cache = KVCache(model, parse("kivi2:window=0"))
    cache.reserve(400)
    forward(model, cache, tokens(50))
    addresses = [b.data_ptr() for layer in packed_layers(cache) for rows in layer.rows for b in rows._buffers]
    reserved = [rows.reserved_bytes for layer in packed_layers(cache) for rows in layer.rows]
    fill(model, cache, tokens(350))
    cache.seal()
    assert [
        b.data_ptr() for layer in packed_layers(cache) for rows in layer.rows for b in rows._buffers
    ] == addresses
    assert [rows.reserved_bytes for layer in packed_layers(cache) for rows in layer.rows] == reserved
    assert cache.nbytes <= cache.reserved_bytes


def test_the_window_does_not_keep_the_chunk_alive() -> None:
    model = served()
    cache = fill(model, KVCache(model, parse("kivi2:window=32")), tokens(300), 300)
    cache.seal()
    for layer in packed_layers(cache):
        assert layer.keys is not None
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


# --- going back ---------------------------------------------------------------------------------------------


def answer(model: Any, cache: KVCache, seed: int, decode: int = 70) -> list[Tensor]:
    """A question as one chunk, then one token after another."""
    logits = [forward(model, cache, tokens(40, seed))]
    for _ in range(decode):
        logits.append(forward(model, cache, [int(logits[-1].argmax())]))
    return logits


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("spec", ["kivi2:window=0", "kivi3:window=32,sink=150,rope=pre", "fp16"])
def test_restore_is_exact(family: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer packs new blocks, grows the buffers, slides the windows and (at sink=150) fills the sink."""
    monkeypatch.setattr("kvchat.kv.rows.GROWTH", 0)
    model = served(family)
    cache = fill(model, KVCache(model, parse(spec)), tokens(140))
    cache.seal()
    before, packed = [t.clone() for t in held(cache)], [layer.packed_tokens for layer in packed_layers(cache)]
    snapshot = cache.snapshot()
    first = answer(model, cache, seed=1)
    assert all(layer.packed_tokens > p for layer, p in zip(packed_layers(cache), packed, strict=True))
    for seed in (2, 1):
        cache.restore(snapshot)
        assert cache.get_seq_length() == 140
        assert [len(layer.starts) * layer.fmt.block for layer in packed_layers(cache)] == packed
        assert same(held(cache), before)
        again = answer(model, cache, seed)
        assert same(again, first) == (seed == 1)


def test_snapshots_nest() -> None:
    model = served()
    cache = fill(model, KVCache(model, parse("kivi2:window=0")), tokens(100))
    cache.seal()
    outer, at_outer = cache.snapshot(), [t.clone() for t in held(cache)]
    answer(model, cache, 1)
    inner, at_inner = cache.snapshot(), [t.clone() for t in held(cache)]
    answer(model, cache, 2)
    cache.restore(inner)
    assert same(held(cache), at_inner)
    cache.restore(outer)
    assert same(held(cache), at_outer)


def test_a_snapshot_copies_no_block() -> None:
    model = served()
    cache = fill(model, KVCache(model, parse("kivi2")), tokens(300))
    with LargestFloat() as largest:
        cache.restore(cache.snapshot())
    assert largest.most == 0


def test_the_state_depends_on_the_chunk_size_alone() -> None:
    model = served()

    def state(chunk: int) -> list[Tensor]:
        cache = fill(model, KVCache(model, parse("kivi2:window=0")), tokens(300), chunk)
        cache.seal()
        return held(cache)

    assert same(state(60), state(60))
    assert not same(state(60), state(90))


def test_sealing_twice_changes_nothing() -> None:
    model = served()
    cache = fill(model, KVCache(model, parse("kivi2:window=0")), tokens(300))
    cache.seal()
    state, nbytes = [t.clone() for t in held(cache)], cache.nbytes
    cache.seal()
    assert same(held(cache), state) and cache.nbytes == nbytes


def test_reset_forgets_everything() -> None:
    model = served()
    cache = fill(model, KVCache(model, parse("kivi2")), tokens(300))
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    fresh = fill(model, KVCache(model, parse("kivi2")), tokens(200))
    assert same(held(fill(model, cache, tokens(200))), held(fresh))


# --- refusals -----------------------------------------------------------------------------------------------


def stub(family: str, **settings: Any) -> Any:
    """As much of a model as a cache looks at before it refuses."""
    config = AutoConfig.for_model(family, **settings)
    layers = [SimpleNamespace(self_attn=None)] * config.num_hidden_layers
    return SimpleNamespace(config=config, get_decoder=lambda: SimpleNamespace(layers=layers))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_refused(family: str) -> None:
    with pytest.raises(ModelRefused, match=f"{family}.*MLA"):
        KVCache(stub(family, num_hidden_layers=2), parse("kivi2"))


def test_linear_attention_is_refused() -> None:
    types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelRefused, match="qwen3_next.*'linear_attention'"):
        KVCache(stub("qwen3_next", num_hidden_layers=2, layer_types=types), parse("kivi2"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_is_refused(family: str) -> None:
    model = served(family)
    with pytest.raises(KVChatError, match="one"), torch.no_grad():
        model(torch.tensor([tokens(5), tokens(5)]), cache=KVCache(model, parse("kivi2")), use_cache=True)


def test_a_padding_mask_is_refused() -> None:
    layer = PackedLayer(parse("kivi2"))
    x = torch.zeros(1, 2, 3, 16)
    layer.update(x, x)
    with pytest.raises(KVChatError, match="unpadded"):
        attention.attend(torch.nn.Module(), x, layer, layer, torch.ones(1, 3), 1.0)


def test_a_packed_layer_cannot_be_cropped() -> None:
    layer = PackedLayer(parse("kivi2"))
    assert not layer.is_croppable
    with pytest.raises(AttributeError):
        layer.crop(3)  # type: ignore[attr-defined]
