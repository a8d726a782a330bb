"""Steps whose state does not move, against the packed layers' own way; without a graph, which takes a GPU."""

from typing import Any

import pytest
import torch
from kvchat_kernels import reference
from tiny import tiny_model, tokens
from torch import Tensor

from kvchat.engine import Engine
from kvchat.kv import attention, ops
from kvchat.kv.format import parse
from kvchat.kv.step import DecodeStep

STEPS = 90  # over two blocks of 32

CLOSE = 2e-2
"""What is wrong is further off. Rounding in another order is far closer, until it moves a code to its neighbour."""

SPECS = ["kivi4:window=32", "kivi2:window=40,sink=5", "kivi3:window=32,sink=3,rope=pre", "kivi4:window=0"]


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: Any, **settings: Any) -> Tensor:
        return reference.attention_step(*args, **settings).float()

    monkeypatch.setattr(ops, "attention_step", step)


def opened(family: str, spec: str, length: int = 200) -> Engine:
    attention.register()
    model = tiny_model(family)
    model.set_attn_implementation(attention.NAME)
    engine = Engine(model, parse(spec), chunk=50)
    for _ in engine.prefill(tokens(length)):
        pass
    return engine


@torch.no_grad()
def logits(engine: Engine, ids: list[int], decode: DecodeStep | None) -> Tensor:
    rows = []
    for token in ids:
        engine._forward([token], decode=decode)
        assert engine._logits is not None
        rows.append(engine._logits[-1].clone())
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
@pytest.mark.parametrize("spec", SPECS)
def test_steps_give_what_the_packed_layers_give(family: str, spec: str) -> None:
    plain, stepped = opened(family, spec), opened(family, spec)
    ids = tokens(STEPS, 3)
    decode = DecodeStep(stepped.model, stepped.cache, STEPS)
    wanted, got = logits(plain, ids, None), logits(stepped, ids, decode)
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=CLOSE)
    assert stepped.tokens == plain.tokens
    assert stepped.cache.nbytes == plain.cache.nbytes
    for ours, theirs in zip(stepped.cache.part(0).items(), plain.cache.part(0).items(), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1].shape == theirs[1].shape
        same = torch.isclose(ours[1].float(), theirs[1].float(), atol=CLOSE, rtol=CLOSE)
        assert int((~same).sum()) <= same.numel() // 100
    # and the next question is read as if nothing had been
    more = tokens(30, 4)
    after = [list(engine.prefill(more)) and engine._logits for engine in (stepped, plain)]
    torch.testing.assert_close(*after, atol=CLOSE, rtol=CLOSE)


def test_rows_do_not_move_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.kv.rows.GROWTH", 0)
    engine = opened("llama", SPECS[0])
    decode = DecodeStep(engine.model, engine.cache, STEPS)
    before = [rows.stored(0, 32)[0].data_ptr() for layer in engine.cache.layers for rows in layer.rows]
    logits(engine, tokens(STEPS, 3), decode)
    assert engine.cache.layers[0].packed_tokens > 200
    assert before == [
        rows.stored(0, 32)[0].data_ptr() for layer in engine.cache.layers for rows in layer.rows
    ]


def test_a_snapshot_before_the_steps_restores_after_them() -> None:
    engine = opened("llama", SPECS[1])
    ids = tokens(STEPS, 3)
    snapshot = engine.cache.snapshot()
    first = logits(engine, ids, DecodeStep(engine.model, engine.cache, STEPS))
    engine.cache.restore(snapshot)
    assert torch.equal(logits(engine, ids, DecodeStep(engine.model, engine.cache, STEPS)), first)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_wrong_position_place_or_count_is_far_off(number: int) -> None:
    """Each number of the state, one too small."""
    plain, stepped = opened("llama", SPECS[1]), opened("llama", SPECS[1])
    decode = DecodeStep(stepped.model, stepped.cache, STEPS)
    forward = decode._forward

    def off_by_one() -> Tensor:
        decode._state[number] -= 1
        return forward()

    decode._forward = off_by_one  # type: ignore[method-assign]
    ids = tokens(8, 3)
    assert float((logits(plain, ids, None) - logits(stepped, ids, decode)).abs().max()) > 0.05
