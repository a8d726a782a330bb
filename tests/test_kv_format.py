"""`KVFormat`: its spelling, its presets, and the true bits it claims."""

import subprocess
import sys

import pytest

from kvchat.errors import UsageError
from kvchat.kv.format import PRESETS, KVFormat, Quant, parse


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_spelled_by_its_name(name: str) -> None:
    assert parse(name) == PRESETS[name]


def test_kivi_is_as_published() -> None:
    for bits in (2, 3, 4):
        fmt = parse(f"kivi{bits}")
        assert (fmt.keys, fmt.values) == (Quant(bits, "channel", 32), Quant(bits, "token", 32))
        assert (fmt.window, fmt.sink, fmt.pre_rope) == (128, 0, False)


def test_every_setting() -> None:
    fmt = parse("kivi2:k=4,v=3,kgroup=64,vgroup=128,window=32,sink=4,rope=pre")
    assert fmt == KVFormat(
        "kivi2:k=4,v=3,kgroup=64,vgroup=128,window=32,sink=4,rope=pre",
        Quant(4, "channel", 64),
        Quant(3, "token", 128),
        window=32,
        sink=4,
        pre_rope=True,
    )
    assert parse("kivi2:group=128").keys.group == parse("kivi2:group=128").values.group == 128
    assert not parse("kivi2:rope=post").pre_rope


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kivi5", "kivi4"),
        ("", "fp16"),
        ("kivi2:k=5", "2, 3, 4, 16 or 32"),
        ("kivi2:group=48", "32, 64 or 128"),
        ("kivi2:window=-1", "from 0 to"),
        ("kivi2:window=99999999999999999999", "from 0 to"),
        ("kivi2:sink=-1", "from 0 to"),
        ("kivi2:", "cannot read ''"),
        ("kivi2:k=4,k=2", "k=2"),
        ("kivi2:k=\u0664", "k=\u0664"),
        ("kivi2:sink=four", "sink=four"),
        ("kivi2:rope=maybe", "rope=maybe"),
        ("kivi2:colour=2", "kivi2 has no setting 'colour'"),
        ("kivi2:k", "'k'"),
    ],
)
def test_a_wrong_spelling_is_named(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "head_dim", "bits"),
    [
        ("kivi2", 64, 3.0),
        ("kivi3", 64, 4.0),
        ("kivi4", 64, 5.0),
        ("kivi2:group=128", 128, 2.25),
        ("kivi2:k=4,v=2", 128, 4.0),
        ("kivi2", 80, (3.0 + 2 + 32 * 3 / 80) / 2),  # three groups of values in 80 channels
        ("kivi2", 16, (3.0 + 4.0) / 2),
        ("fp16", 64, 16.0),
    ],
)
def test_true_bits(spec: str, head_dim: int, bits: float) -> None:
    assert parse(spec).true_bits(head_dim, 2) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("spec", "block"), [("fp16", 32), ("kivi2", 32), ("kivi2:kgroup=64", 64), ("kivi2:vgroup=128", 32)]
)
def test_a_block_completes_every_group(spec: str, block: int) -> None:
    assert parse(spec).block == block


def test_formats_cost_no_torch() -> None:
    modules = "kvchat.kv.format, kvchat.memory, kvchat.models.families"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
