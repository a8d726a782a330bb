"""`Engine`: chunks in, tokens out, by greedy choice or by chance."""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import tiny_loaded, tokens

from kvchat.engine import Engine, Sampling
from kvchat.errors import DoesNotFit
from kvchat.kv.format import parse


@pytest.fixture(scope="module")
def loaded() -> Any:
    return tiny_loaded()


def engine(loaded: Any, spec: str = "kivi2:window=32", chunk: int = 50) -> Engine:
    return Engine(loaded.model, parse(spec), chunk)


def generated(
    loaded: Any, sampling: Sampling, prompt: list[int], stop: frozenset[int] = frozenset()
) -> list[int]:
    return list(engine(loaded).generate(prompt, sampling, stop))


def test_prefill_yields_after_each_chunk(loaded: Any) -> None:
    assert list(engine(loaded).prefill(tokens(120))) == [50, 100, 120]
    assert list(engine(loaded).prefill([])) == []


def test_greedy_answers_are_the_models_own(loaded: Any) -> None:
    """With exact storage, the tokens are those of a loop over stock attention without any cache."""
    got = list(engine(loaded, "fp16:k=32,v=32").generate(tokens(60), Sampling(max_tokens=20), frozenset()))
    ids = tokens(60)
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for _ in range(20):
                ids.append(int(loaded.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    finally:
        loaded.model.set_attn_implementation("kvchat")
    assert got == ids[60:]
    assert got != generated(loaded, Sampling(max_tokens=20), tokens(60, seed=1))


@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_tokens(loaded: Any, most: int) -> None:
    one = engine(loaded)
    assert len(list(one.generate(tokens(10), Sampling(max_tokens=most), frozenset()))) == most
    assert one.tokens == 10 + most - 1, "the last token isn't read, for nobody asks what follows it"


def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(loaded: Any) -> None:
    whole = generated(loaded, Sampling(max_tokens=12), tokens(10))
    stop = next(t for t in whole if t != whole[0])
    assert (
        generated(loaded, Sampling(max_tokens=12), tokens(10), frozenset([stop]))
        == whole[: whole.index(stop)]
    )
    assert generated(loaded, Sampling(max_tokens=12), tokens(10), frozenset([whole[0]])) == []


def test_the_same_seed_gives_the_same_answer(loaded: Any) -> None:
    hot = [generated(loaded, Sampling(temperature=3.0, seed=s, max_tokens=30), tokens(10)) for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    greedy = [generated(loaded, Sampling(seed=s, max_tokens=30), tokens(10)) for s in (1, 2)]
    assert greedy[0] == greedy[1]


def test_chance_does_not_depend_on_torchs_global_state(loaded: Any) -> None:
    sampling = Sampling(temperature=3.0, max_tokens=10)
    torch.manual_seed(5)
    first = generated(loaded, sampling, tokens(10))
    torch.manual_seed(6)
    state = torch.get_rng_state()
    assert generated(loaded, sampling, tokens(10)) == first
    assert torch.equal(torch.get_rng_state(), state)


def drawn(logits: list[float], sampling: Sampling, loaded: Any, count: int = 400) -> Counter[int]:
    one = engine(loaded)
    one._logits = torch.tensor([[99.0] * len(logits), logits])  # the last row counts
    generator = torch.Generator().manual_seed(sampling.seed)
    return Counter(one._choose(sampling, generator) for _ in range(count))


def test_top_p_keeps_the_nucleus(loaded: Any) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert drawn(logits, Sampling(temperature=1.0), loaded).keys() == {0, 1, 2, 3}
    assert drawn(logits, Sampling(temperature=1.0, top_p=0.9), loaded).keys() == {0, 1, 2}
    assert drawn(logits, Sampling(temperature=1.0, top_p=0.6), loaded).keys() == {0, 1}
    assert drawn(logits, Sampling(temperature=1.0, top_p=0.01), loaded).keys() == {0}
    assert drawn(logits, Sampling(), loaded) == {0: 400}


def test_temperature_flattens(loaded: Any) -> None:
    logits = [2.0, 0.0]
    cold, warm, hot = (drawn(logits, Sampling(temperature=t), loaded)[1] for t in (0.2, 1.0, 100.0))
    assert cold == 0
    assert 20 < warm < 80  # exp(-2) / (1 + exp(-2)) of 400 is 48
    assert 160 < hot < 240


def test_choices_are_the_likeliest_next_tokens(loaded: Any) -> None:
    ids = tokens(60)
    got = engine(loaded).choices(ids)
    for i in (0, 31, 59):
        one = engine(loaded, chunk=100)
        assert list(one.generate(ids[: i + 1], Sampling(max_tokens=1), frozenset())) == [got[i]]


def test_a_device_without_memory_says_so(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(loaded)
    list(one.prefill(tokens(50)))

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(loaded.model, "forward", full)
    with pytest.raises(DoesNotFit, match="after 50 tokens"):
        list(one.prefill(tokens(10)))
