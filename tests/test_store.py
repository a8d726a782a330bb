"""Stored caches: a reloaded one answers like a fresh one, and nothing that was cut, changed or damaged is ever used."""

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from tiny import VOCABULARY, tiny_calibration, tiny_model, tiny_tokenizer

from kvchat import places
from kvchat.documents import Document, Span
from kvchat.engine import Engine, Sampling
from kvchat.kv.cache import KVCache, layout
from kvchat.kv.format import PRESETS, parse
from kvchat.models.find import Found
from kvchat.models.fingerprint import fingerprint
from kvchat.models.load import load
from kvchat.session import Session
from kvchat.store import Store, files
from kvchat.store.key import Key, chain
from kvchat.store.manifest import NAME, Manifest, Unusable

CHUNK, SEGMENT = 64, 256
LINES = [f"Line {i}: the number of crate {i * 37 % 101} is {i * 7919 % 10007}.\n" for i in range(60)]
TEXT = "".join(LINES)
SPEC = "kivi2:window=16,sink=3"


def saved(folder: Path, family: str = "llama", **settings: Any) -> Path:
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, **settings}
    tiny_model(family, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = saved(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return folder


@pytest.fixture
def loaded(folders: Callable[[str], Path]) -> Any:
    return load(Found("tiny", folders("llama")), "cpu")


@pytest.fixture
def store() -> Store:
    return Store(places.caches(), 1 << 30)


def document(text: str = TEXT, name: str = "crates.txt") -> Document:
    return Document(name, text, (Span(0, len(text), line=1),), ("a note",))


def opened(loaded: Any, store: Store | None, spec: str = SPEC, *texts: str, refresh: bool = False) -> Session:
    documents = [document(text, f"{i}.txt") for i, text in enumerate(texts or (TEXT,))]
    fmt = parse(spec)
    return Session(
        loaded,
        fmt,
        documents,
        chunk=CHUNK,
        segment=SEGMENT,
        store=store,
        refresh=refresh,
        calibration=tiny_calibration(loaded.model) if fmt.calibrated else None,
    )


def read(session: Session) -> Session:
    for _ in session.read():
        pass
    return session


def outcome(session: Session) -> tuple[torch.Tensor, list[str]]:
    """The logits after a question, and the answers to two."""
    answers = ["".join(session.ask(q, Sampling(max_tokens=12))) for q in ("Which crate?", "And then?")]
    session.clear()
    engine = session.engine
    engine._forward(session.prompt.question_ids("Which?"))
    assert engine._logits is not None
    logits = engine._logits.clone()
    session.clear()
    return logits, answers


def assert_same(a: tuple[torch.Tensor, list[str]], b: tuple[torch.Tensor, list[str]]) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1] == b[1]


def stored_files(store: Store) -> list[Path]:
    return sorted(p for p in store.folder.glob("*/*") if p.is_file())


# --- what is reloaded is what was read ------------------------------------------------------------------------

FORMATS = [
    *PRESETS,
    SPEC,
    "kivi2:rope=pre,sink=4,window=8",
    "kivi3:k=2,v=4,kgroup=64,window=0",
    "kivi4:k=32,v=32",
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
@pytest.mark.parametrize("spec", FORMATS)
def test_fresh_again_and_reloaded_are_the_same(
    folders: Callable[[str], Path], store: Store, family: str, spec: str
) -> None:
    loaded = load(Found(family, folders(family)), "cpu")
    fresh = outcome(read(opened(loaded, None, spec)))
    first = read(opened(loaded, store, spec))
    assert first.restored_tokens == 0
    again = read(opened(loaded, store, spec))
    assert again.restored_tokens == len(again.prefix)
    anew = read(opened(load(Found(family, folders(family)), "cpu"), store, spec))
    assert anew.restored_tokens == len(anew.prefix)
    assert anew.engine.cache.nbytes == first.engine.cache.nbytes
    for session in (first, again, anew):
        assert session.notes() == []
        assert_same(outcome(session), fresh)
    assert first.stored is not None


def test_a_wrong_token_or_a_lost_block_would_show(loaded: Any, store: Store) -> None:
    """Negative control of the test above."""
    fresh = outcome(read(opened(loaded, None)))
    assert not torch.equal(fresh[0], outcome(read(opened(loaded, None, SPEC, TEXT.replace("7", "8", 1))))[0])
    session = read(opened(loaded, store))
    for layer in session.engine.cache.layers:
        layer.rows[1]._buffers[1][0, 40] += 1  # type: ignore[attr-defined]
    session._start = session.engine.cache.snapshot()
    assert not torch.equal(fresh[0], outcome(session)[0])


def test_the_window_is_exact_after_the_last_end(loaded: Any) -> None:
    engine = Engine(loaded.model, parse("kivi2:window=16,sink=3"), CHUNK, SEGMENT)
    assert engine.ends(600) == [259, 515, 600]
    assert engine.ends(515 + 15) == [259, 530]
    assert engine.ends(515 + 16) == [259, 515, 531]
    wide = Engine(loaded.model, parse("kivi2:window=40"), CHUNK, SEGMENT)
    assert wide.ends(1200) == [512, 1024, 1200]  # a segment is many windows long
    exact = Engine(loaded.model, parse("fp16"), CHUNK, SEGMENT)
    assert exact.ends(512) == [256, 512]


def test_the_layout_is_what_the_cache_gives(folders: Callable[[str], Path]) -> None:
    for family in ("llama", "gemma3_text"):
        loaded = load(Found(family, folders(family)), "cpu")
        for spec in FORMATS:
            session = opened(loaded, None, spec)
            cache, fmt, start = session.engine.cache, session.fmt, 0
            for end in session._ends:
                for _ in session.engine.prefill(session.prefix[session.engine.tokens : end]):
                    pass
                last = end == len(session.prefix)
                cache.seal() if last else cache.close()
                part = {name: (tuple(t.shape), t.dtype) for name, t in cache.part(start).items()}
                assert part == layout(loaded.shape, fmt, loaded.dtype, start, end, closed=not last)
                start = end


def test_sealed_and_closed_ends_are_told_apart() -> None:
    """At the same token one has a window and the other none."""
    key = Key({"a": "b"})
    ids = list(range(600))
    assert chain(key, ids[:256], [256]) != chain(key, ids, [256, 600])[:1]
    assert chain(key, ids, [256, 600])[:1] == chain(key, ids[:580], [256, 580])[:1]
    assert chain(Key({"a": "c"}), ids, [600]) != chain(key, ids, [600])


# --- a document that grew, a reading that was stopped ---------------------------------------------------------


def test_a_document_that_grew_reuses_what_came_before(loaded: Any, store: Store) -> None:
    read(opened(loaded, store))
    longer = TEXT + "One more crate came: 4711.\n" * 20
    grown = opened(loaded, store, SPEC, longer)
    [note] = grown.notes()
    assert "differs from the stored one after token" in note
    read(grown)
    assert grown.restored_tokens == grown._ends[len(opened(loaded, None)._ends) - 2]
    assert_same(outcome(grown), outcome(read(opened(loaded, None, SPEC, longer))))
    assert grown.stored
    whole = read(opened(loaded, store, SPEC, longer))
    assert whole.restored_tokens == len(whole.prefix)


def test_a_folder_whose_later_file_changed_reuses_the_earlier_ones(loaded: Any, store: Store) -> None:
    before = read(opened(loaded, store, SPEC, TEXT, "The lock is blue.\n" * 20))
    changed = read(opened(loaded, store, SPEC, TEXT, "The lock is red.\n" * 20))
    shared = len(os.path.commonprefix([before.prefix, changed.prefix]))
    assert shared > len(TEXT)
    assert changed.restored_tokens == max(e for e in changed._ends if e <= shared)
    other = (TEXT, "The lock is red.\n" * 20)
    assert_same(outcome(changed), outcome(read(opened(loaded, None, SPEC, *other))))


def test_blocks_that_two_caches_share_are_there_once(loaded: Any, store: Store) -> None:
    read(opened(loaded, store))
    alone = store.bytes
    read(opened(loaded, store, SPEC, TEXT + "x" * 40))
    assert len(store.shelf()) == 2
    assert store.bytes < sum(s.bytes for s in store.shelf())
    assert store.bytes - alone < alone / 2


@pytest.mark.parametrize("left_after", [1, 4, 5, 9, 13])
def test_a_stopped_reading_goes_on_from_the_last_segment(loaded: Any, store: Store, left_after: int) -> None:
    stopped = opened(loaded, store)
    steps = stopped.read()
    for _ in islice(steps, left_after):
        pass
    steps.close()
    kept = max([0, *(e for e in stopped._ends if e < stopped.engine.tokens)])
    stopped.close()
    goes_on = opened(loaded, store)
    read(goes_on)
    assert goes_on.restored_tokens == kept
    assert goes_on.notes() == []
    fresh = outcome(read(opened(loaded, None)))
    assert_same(outcome(goes_on), fresh)
    read(stopped)  # the same session too, though another one has finished meanwhile
    assert_same(outcome(stopped), fresh)


def test_a_failure_in_the_middle_reads_on_from_the_store(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(loaded, store)
    forward, calls = Engine._forward, count()

    def failing(engine: Engine, *args: Any, **kwargs: Any) -> None:
        if next(calls) == 6:
            raise MemoryError
        forward(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "_forward", failing)
    with pytest.raises(MemoryError):
        read(session)
    read(session)
    assert session.restored_tokens == session._ends[0]
    assert_same(outcome(session), outcome(read(opened(loaded, None))))


# --- what a cache depends on ----------------------------------------------------------------------------------


def edited(folder: Path, name: str, **changes: Any) -> None:
    value = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(value | changes))


def other_weights(folder: Path) -> None:
    tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.2).save_pretrained(folder / "new")
    os.replace(folder / "new" / "model.safetensors", folder / "model.safetensors")


CHANGES: dict[str, Callable[[Path], None]] = {
    "RoPE settings": lambda f: edited(
        f, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    ),
    "model configuration": lambda f: edited(f, "config.json", rms_norm_eps=1e-3),
    "tokenizer": lambda f: edited(f, "tokenizer.json", version="1.0 "),
    "chat template": lambda f: (f / "chat_template.jinja").write_text(
        (f / "chat_template.jinja").read_text() + "{# the same, said otherwise #}"
    ),
    "weights": other_weights,
    "adapters": lambda f: (f / "adapter_config.json").write_text("{}"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_another_model_is_another_cache(folders: Callable[[str], Path], tmp_path: Path, part: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders("llama"), folder)
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    CHANGES[part](folder)
    after = fingerprint(folder)
    assert {name for name in after if after[name] != before[name]} == {part}


def test_weights_are_hashed_once(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders("llama"), folder)
    before = fingerprint(folder)
    with monkeypatch.context() as patch:
        patch.setattr("kvchat.models.fingerprint._sha256", lambda _: "hashed anew")
        assert fingerprint(folder)["weights"] == before["weights"]
        os.utime(folder / "model.safetensors")
        assert fingerprint(folder)["weights"] != before["weights"]
    places.models().joinpath("checksums.json").write_text("not json")
    assert fingerprint(folder) == before


def test_the_part_that_differs_is_named(loaded: Any, store: Store, folders: Callable[[str], Path]) -> None:
    read(opened(loaded, store))
    cases = {
        "another KV format (kivi2:window=16,sink=3)": opened(loaded, store, "kivi4:window=16"),
        "another precision": opened(replace(loaded, dtype=torch.float16), store),
        "another text": opened(loaded, store, SPEC, "Another text. " * 50),
        "another weights": opened(replace(loaded, folder=folders("qwen2")), store),
    }
    for words, session in cases.items():
        assert session.restored_tokens == 0
        assert any(words.split("another ")[1] in note for note in session.notes()), words
    chunked = Session(loaded, parse(SPEC), [document(TEXT, "0.txt")], chunk=32, segment=SEGMENT, store=store)
    assert "chunk size" in chunked.notes()[0]
    unrelated = Session(loaded, parse(SPEC), [document(TEXT, "unrelated.txt")], store=store)
    assert unrelated.notes() == []


def test_a_spelling_is_no_difference(loaded: Any, store: Store) -> None:
    read(opened(loaded, store, "kivi2:window=16"))
    same = read(opened(loaded, store, "kivi2:v=2,k=2,window=16"))
    assert same.restored_tokens == len(same.prefix)


def test_refresh_reads_anew_and_keeps_the_old_cache_until_the_new_one_is_whole(
    loaded: Any, store: Store
) -> None:
    read(opened(loaded, store)).close()
    before = {p: p.read_bytes() for p in stored_files(store)}
    anew = opened(loaded, store, refresh=True)
    steps = anew.read()
    for _ in islice(steps, 7):
        pass
    steps.close()
    anew.close()
    assert before.items() <= {p: p.read_bytes() for p in stored_files(store)}.items()
    assert read(opened(loaded, store)).restored_tokens == len(anew.prefix)
    again = read(opened(loaded, store, refresh=True))
    assert again.restored_tokens == 0
    assert again.stored


# --- writing survives anything --------------------------------------------------------------------------------


def test_files_are_private(loaded: Any, store: Store) -> None:
    read(opened(loaded, store))
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    for path in store.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, nothing is cleaned up after it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Die at the n-th thing that writing does to the disk, and do nothing to it any more."""
    steps, dead = count(), []

    def dying(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if dead or next(steps) == step:
                dead.append(name)
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(files.os, name, call)

    for name in ("replace", "fsync", "unlink", "link", "fdopen"):
        dying(name)


def test_a_kill_at_any_step_leaves_the_old_or_the_new_cache(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = outcome(read(opened(loaded, None)))
    seen, step = set(), 0
    while True:
        session = opened(loaded, store)
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            try:
                read(session)
                finished = True
            except Killed:
                finished = False
        session.close()
        after = read(opened(loaded, store))
        assert after.notes() == []
        seen.add(after.restored_tokens)
        assert_same(outcome(after), fresh)
        after.close()
        if finished:
            break
        shutil.rmtree(store.folder)
        step += 1
    assert step > 15
    assert seen == {0, *after._ends}


def test_what_killed_processes_left_is_swept(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(loaded, store)
    with monkeypatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            read(session)
    session.close()
    left = [p for p in store.folder.glob("*/*") if p.name.startswith(files.TEMPORARY)]
    assert left
    store.sweep()
    assert not any(p.exists() for p in left)
    assert read(opened(loaded, store)).notes() == []


def filling(write: Callable[[Path, bytes], None], room: int) -> Callable[[Path, bytes], None]:
    """Writes so many files, then the disk is full."""
    written = count()

    def full(path: Path, data: bytes) -> None:
        if next(written) >= room:
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    return full


def test_a_full_disk_is_said_and_the_answer_comes(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = outcome(read(opened(loaded, None)))
    for step in range(0, 12, 2):
        full = filling(files.write, step)

        with monkeypatch.context() as patch:
            patch.setattr("kvchat.store.files.write", full)
            patch.setattr("kvchat.store.manifest.write", full)
            session = read(opened(loaded, store))
        [note] = session.notes()
        assert "not kept on disk" in note and "No space left" in note
        assert session.stored is None
        assert_same(outcome(session), fresh)
        session.close()
        after = read(opened(loaded, store))
        assert after.notes() == []
        assert_same(outcome(after), fresh)
        after.close()
        shutil.rmtree(store.folder)


def test_a_folder_that_cannot_be_written_is_said(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    session = read(opened(loaded, Store(tmp_path / "file" / "caches", 1 << 30)))
    [note] = session.notes()
    assert "not kept on disk" in note
    assert len(outcome(session)[1]) == 2


def test_no_room_is_said_before_anything_is_read(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    session = opened(loaded, store)
    [note] = session.notes()
    assert "1000 B are free" in note
    read(session)
    assert not store.folder.exists()
    small = opened(loaded, Store(store.folder, 2000))
    assert "--max-size is 2.0 KiB" in small.notes()[0]


def test_another_process_that_writes_the_same_is_left_alone(loaded: Any, store: Store) -> None:
    session = opened(loaded, store)
    store.folder.mkdir(parents=True)
    with FileLock(store.folder / f".{session._entry.id}.lock"):  # type: ignore[union-attr]
        read(session)
    [note] = session.notes()
    assert "another kvchat has it open" in note
    assert stored_files(store) == []
    assert_same(outcome(session), outcome(read(opened(loaded, None))))


# --- reading trusts nothing -----------------------------------------------------------------------------------


def damage(path: Path, chance: random.Random) -> None:
    """Flip one bit, cut the end off, or add to it."""
    data = bytearray(path.read_bytes())
    match chance.randrange(4):
        case 0:
            del data[chance.randrange(len(data)) :]
        case 1:
            data += bytes([chance.randrange(256)])
        case _:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))


def test_every_damage_is_noticed_and_none_changes_an_answer(loaded: Any, store: Store) -> None:
    chance = random.Random(0)
    first = read(opened(loaded, store))
    first.close()
    fresh = outcome(first)
    intact = {p: p.read_bytes() for p in stored_files(store)}
    noticed = set()
    for _ in range(40):
        path = chance.choice([p for p in intact if not p.name.startswith("documents")])
        damage(path, chance)
        session = read(opened(loaded, store))
        notes = session.notes()
        assert notes, path
        noticed.add(path)
        assert_same(outcome(session), fresh)
        session.close()
        shutil.rmtree(store.folder)
        for file, data in intact.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    assert len(noticed) == len(intact) - 1


def test_a_damaged_cache_is_mended_by_reading(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    second = [p for p in stored_files(store) if p.name.startswith("00001")]
    second[0].write_bytes(second[0].read_bytes()[:-1])
    session = read(opened(loaded, store))
    [note] = session.notes()
    assert f"from token {session._ends[0]:,} on" in note
    assert session.restored_tokens == session._ends[0]
    session.close()
    again = read(opened(loaded, store))
    assert again.notes() == []
    assert again.restored_tokens == len(again.prefix)


@pytest.mark.parametrize("name", [NAME, "00000", "00001"])
def test_what_stands_in_the_way_is_cleared_away(loaded: Any, store: Store, name: str) -> None:
    """A folder or a dangling link in a file's place: said once, and the next cache is whole again."""
    read(opened(loaded, store)).close()
    for make in (lambda p: p.mkdir(), lambda p: p.symlink_to("nowhere")):
        path = next(p for p in stored_files(store) if p.name.startswith(name))
        path.unlink()
        make(path)
        session = read(opened(loaded, store))
        assert len(session.notes()) == 1
        assert session.stored
        session.close()
        again = read(opened(loaded, store))
        assert again.notes() == []
        assert again.restored_tokens == len(again.prefix)
        again.close()


def test_a_whole_but_foreign_file_is_not_used(loaded: Any, store: Store) -> None:
    """Checksums that fit prove nothing about a model, so names, shapes, types and tokens are compared as well."""
    session = read(opened(loaded, store))
    session.close()
    [stored] = store.shelf()
    assert stored.manifest is not None
    from kvchat.store import segments

    for change, words in (
        (lambda part: part.pop("0.keys.codes"), "tensors of this model"),
        (lambda part: part.update({"0.keys.scale": part["0.keys.scale"].float()}), "tensors of this model"),
        (lambda part: part.update({"0.keys.codes": part["0.keys.codes"][:, 1:]}), "tensors of this model"),
        (None, "other tokens"),
    ):
        part = session.engine.cache.part(0)
        part = {n: t for n, t in part.items()}
        ids = session.prefix[: session._ends[0]]
        if change:
            change(part)
        data = segments.encode(part, ids if change else ids[::-1])
        segment = stored.manifest.segments[0]
        file = replace(segment.file, bytes=len(data), sha256=files.sha256(data))
        (stored.folder / file.name).write_bytes(data)
        stored.manifest.with_segments((replace(segment, file=file), *stored.manifest.segments[1:])).write(
            stored.folder
        )
        other = opened(loaded, store)
        read(other)
        other.close()
        assert other.restored_tokens == 0
        [note] = other.notes()
        assert words in note


@pytest.mark.parametrize(
    "change", [{"version": None}, {"text": 5}, {"segments": [{"stop": "x"}]}, {"key": []}]
)
def test_a_manifest_that_makes_no_sense_is_no_crash(
    loaded: Any, store: Store, change: dict[str, Any]
) -> None:
    """Its checksum may be right all the same."""
    from kvchat.store import manifest

    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    value = json.loads((stored.folder / NAME).read_text())
    del value["checksum"]
    (stored.folder / NAME).write_bytes(manifest._encode(value | change))
    [broken] = store.shelf()
    assert broken.manifest is None
    session = read(opened(loaded, store))
    assert len(session.notes()) == 1
    assert session.stored


def test_room_is_not_made_of_what_is_being_used(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [before] = store.shelf()
    small = Store(store.folder, int(before.bytes * 1.5))
    grown = read(opened(loaded, small, SPEC, TEXT + "One more crate.\n" * 4))
    assert grown.stored
    assert not any("not kept" in note for note in grown.notes())


def test_what_could_not_be_kept_leaves_no_text_behind(
    loaded: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvchat.store.files.write", filling(files.write, 1)
    )  # the documents' text, then nothing
    read(opened(loaded, store))
    assert stored_files(store) == []


def test_another_versions_cache_is_said_and_written_over(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    from kvchat.store import manifest

    value = json.loads((stored.folder / NAME).read_text())
    del value["checksum"]
    (stored.folder / NAME).write_bytes(manifest._encode({**value, "version": 99}))
    with pytest.raises(Unusable, match="another version"):
        Manifest.read(stored.folder)
    session = opened(loaded, store)
    assert "another version of kvchat" in session.notes()[0]
    assert read(session).stored
    session.close()
    assert read(opened(loaded, store)).restored_tokens == len(session.prefix)


def test_a_cache_that_vanishes_while_it_is_used_is_read_anew(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    session = opened(loaded, store)
    shutil.rmtree(store.folder)
    read(session)
    assert "cannot be read" in session.notes()[0]
    assert_same(outcome(session), outcome(read(opened(loaded, None))))


def test_the_documents_come_back_with_their_spans(loaded: Any, store: Store) -> None:
    session = read(
        opened(loaded, store, SPEC, TEXT, "a second\x85one\u2028 \ud83d\ude00".replace("\ud83d\ude00", "😀"))
    )
    [stored] = store.shelf()
    assert stored.documents() == session.documents
    assert stored.documents()[0].locate(100) == session.documents[0].locate(100)
    stored.check()
    path = next(stored.folder.glob("documents-*"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(Unusable):
        stored.documents()


# --- room -----------------------------------------------------------------------------------------------------


def aged(store: Store) -> list[str]:
    """Give every cache an age, in the order of the shelf, and return their ids, the oldest first."""
    shelf = store.shelf()
    for i, stored in enumerate(shelf):
        os.utime(stored.folder / NAME, (1e9 + i, 1e9 + i))
    return [stored.id for stored in shelf]


def test_the_least_recently_used_goes_first_and_never_one_in_use(loaded: Any, store: Store) -> None:
    for name in "abc":
        read(Session(loaded, parse(SPEC), [document(TEXT, name)], store=store)).close()
    oldest, second, third = aged(store)
    used = next(s for s in store.shelf() if s.id == oldest)
    one = used.bytes
    reopened = Session(
        loaded,
        parse(SPEC),
        [document(TEXT, used.manifest.documents[0])],
        store=store,  # type: ignore[union-attr]
    )
    read(reopened).close()  # used just now
    in_use = Session(
        loaded,
        parse(SPEC),
        [document(TEXT, next(s for s in store.shelf() if s.id == second).manifest.documents[0])],  # type: ignore[union-attr]
        store=store,
    )
    read(in_use)
    os.utime(store.folder / second / NAME, (1e9, 1e9))  # old, but open
    small = Store(store.folder, int(one * 3.5))
    read(Session(loaded, parse(SPEC), [document(TEXT, "d")], store=small)).close()
    left = {s.id for s in store.shelf()}
    assert third not in left
    assert {oldest, second} < left
    assert len(left) == 3
    assert store.bytes <= small.max_bytes


def test_removing_waits_for_no_one(loaded: Any, store: Store) -> None:
    session = read(opened(loaded, store))
    [stored] = store.shelf()
    assert not store.remove(stored)
    session.close()
    assert store.remove(stored)
    assert store.shelf() == []
    assert [p for p in store.folder.iterdir()] == []


def test_a_cache_class_knows_its_parts(loaded: Any) -> None:
    """`adopt` after `part` gives the same bytes in memory."""
    one = read(opened(loaded, None)).engine.cache
    two = KVCache(loaded.model, parse(SPEC))
    ends = opened(loaded, None)._ends
    assert len(ends) > 2
    whole = one.part(0)
    two.adopt(whole)
    assert {n: t.tolist() for n, t in two.part(0).items()} == {n: t.tolist() for n, t in whole.items()}
    assert two.get_seq_length() == one.get_seq_length()


# --- what else may lie there, and what is said ------------------------------------------------------------------


def test_the_nearest_cache_names_the_reason(loaded: Any, store: Store) -> None:
    for spec in (SPEC, "kivi4"):
        read(opened(loaded, store, spec)).close()
    system = Session(
        loaded,
        parse(SPEC),
        [document(TEXT, "0.txt")],
        "Be brief.",
        chunk=CHUNK,
        segment=SEGMENT,
        store=store,
    )
    assert "another instruction; they" in system.notes()[0]
    [note] = opened(loaded, store, SPEC, TEXT.replace("crate", "box")).notes()
    assert f"another text in its first {system.engine.ends(2000)[0]:,} tokens" in note


def test_a_damaged_text_is_written_again(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [text] = [p for p in stored_files(store) if p.name.startswith("documents-")]
    whole = text.read_bytes()
    text.write_bytes(whole.replace(b"crate", b"grate", 1))
    session = read(opened(loaded, store))
    assert session.restored_tokens == len(session.prefix)
    [note] = session.notes()
    assert "documents-" in note
    assert "written again" in note
    assert session.cache_notes == [note]
    session.close()
    assert text.read_bytes() == whole
    again = read(opened(loaded, store))
    assert again.notes() == []


def test_a_folder_one_cannot_look_into_is_said(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    store = Store(tmp_path / "caches", 1 << 30)
    with pytest.raises(NotADirectoryError):
        store.shelf()
    session = read(opened(loaded, store))
    assert "not kept on disk" in session.notes()[0]
    assert outcome(session)[1]


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: p.symlink_to("nowhere")])
def test_what_is_no_folder_gives_way(loaded: Any, store: Store, make: Callable[[Path], Any]) -> None:
    session = read(opened(loaded, store))
    session.close()
    folder = store.shelf()[0].folder
    shutil.rmtree(folder)
    make(folder)
    assert store.shelf() == []
    again = read(opened(loaded, store))
    assert again.notes() == []
    assert again.stored == folder.name
    again.close()
    shutil.rmtree(folder)
    make(folder)
    store.sweep()
    assert not os.path.lexists(folder)


def test_a_linked_cache_is_unlinked(loaded: Any, store: Store, tmp_path: Path) -> None:
    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    shutil.move(stored.folder, tmp_path / "elsewhere")
    stored.folder.symlink_to(tmp_path / "elsewhere")
    assert store.remove(store.shelf()[0])
    assert [p for p in store.folder.iterdir() if not p.name.endswith(".lock")] == []
    assert (tmp_path / "elsewhere" / NAME).exists()


def test_a_copied_cache_is_not_called_another_text(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    stored.folder.rename(stored.folder.with_name("0" * 16))
    session = read(opened(loaded, store))
    assert session.notes() == []
    assert session.restored_tokens == len(session.prefix)


def test_the_cap_holds_also_when_nothing_is_written(loaded: Any, store: Store) -> None:
    read(opened(loaded, store, SPEC, "Another text.")).close()
    read(opened(loaded, store)).close()
    session = read(opened(loaded, Store(store.folder, store.shelf()[-1].bytes)))
    assert session.restored_tokens == len(session.prefix)
    assert [stored.id for stored in store.shelf()] == [session.stored]
    assert [note.split(" least")[0] for note in session.notes()] == ["the 1"]


def test_a_cap_that_cannot_hold_removes_nothing_and_is_said(loaded: Any, store: Store) -> None:
    read(opened(loaded, store, SPEC, "Another text.")).close()
    read(opened(loaded, store)).close()
    session = read(opened(loaded, Store(store.folder, 0)))
    assert session.restored_tokens == len(session.prefix)
    assert len(store.shelf()) == 2
    [note] = session.notes()
    assert "--max-size is 0 B" in note


def test_another_caches_manifest_is_seen_and_replaced(loaded: Any, store: Store) -> None:
    read(opened(loaded, store, SPEC, "Another, longer text. " * 40)).close()
    [other] = store.shelf()
    session = read(opened(loaded, store))
    session.close()
    assert session.stored is not None
    shutil.copy(other.folder / NAME, store.folder / session.stored / NAME)
    again = read(opened(loaded, store))
    assert any("another cache's" in note for note in again.notes())
    again.close()
    assert read(opened(loaded, store)).restored_tokens == len(session.prefix)


def test_foreign_files_stay_and_odd_ones_are_counted(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    (store.folder / "holiday").mkdir()
    for path in (store.folder / "notes.txt", store.folder / "holiday" / "picture", stored.folder / "odd"):
        path.write_text("mine")
    assert store.sweep() == 1
    assert (store.folder / "notes.txt").exists() and (store.folder / "holiday" / "picture").exists()
    assert not (stored.folder / "odd").exists()
    assert [s.id for s in store.shelf()] == [stored.id]


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(loaded: Any, store: Store) -> None:
    read(opened(loaded, store)).close()
    [stored] = store.shelf()
    (stored.folder / NAME).unlink()
    os.mkfifo(stored.folder / NAME)
    session = read(opened(loaded, store))
    assert session.restored_tokens == 0
    assert any("no file" in note for note in session.notes())


def test_an_open_folder_is_closed_to_others(loaded: Any, store: Store) -> None:
    store.folder.mkdir(parents=True, mode=0o755)
    store.folder.chmod(0o755)
    read(opened(loaded, store)).close()
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
