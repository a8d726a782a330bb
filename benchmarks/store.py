"""Stored caches: how much sooner a stored document answers, what it takes on disk, and whether anything can break it.

    python benchmarks/store.py [--rounds 3] [--kills 200] [--damages 200]

The first table times whole processes, `kvchat ask` from its start to the first character of the answer, with the default
model on the sample documents: without a stored cache, then with it. The second kills a process that is writing at a random
moment, or damages a stored file at a random place, and compares the answer after each with that of a fresh reading; a tiny
random model and many small segments make the trials many and the writing dense. JSON lines follow the tables.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
SAMPLES = [ROOT / "sample_docs" / f"harbour-handbook.{kind}" for kind in ("pdf", "txt")]  # 7.5k tokens
QUESTION = "What is the inventory number of the master copy?"
FORMATS = ["fp16", "kivi4", "kivi2"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=200)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(f"{'':8} {'tokens':>7} {'first answer':>13} {'stored':>8} {'sooner':>7} {'on disk / gauge':>16}")
    for spec in FORMATS if options.rounds else []:
        result = time_to_first_token(spec, options.rounds)
        results.append(result)
        print(
            f"{spec:8} {result['tokens']:7,} {result['prefilled_s']:11.1f} s {result['stored_s']:6.2f} s "
            f"{result['times_sooner']:6.1f}x {result['disk_over_gauge']:16.4f}"
        )
    if options.kills or options.damages:
        results += try_to_break(options.kills, options.damages)
    print(*map(json.dumps, results), sep="\n")


def try_to_break(kills: int, damages: int) -> list[dict[str, Any]]:
    trials, results = Trials(), []
    for what, number, trial in (
        ("killed while writing", kills, trials.kill),
        ("damaged on disk", damages, trials.damage),
    ):
        chance = random.Random(0)
        outcomes = [trial(chance) for _ in range(number)]
        wrong, unnoticed, reused = (
            sum(o[name] for o in outcomes) for name in ("wrong", "unnoticed", "reused")
        )
        print(
            f"{number} times {what}: {wrong} wrong answers, {unnoticed} unnoticed, {reused} times a part was used"
        )
        results.append(
            {"what": what, "trials": number, "wrong": wrong, "unnoticed": unnoticed, "reused": reused}
        )
    trials.close()
    return results


def time_to_first_token(spec: str, rounds: int) -> dict[str, Any]:
    arguments = [
        sys.executable,
        "-m",
        "kvchat",
        "ask",
        *map(str, SAMPLES),
        QUESTION,
        "--kv",
        spec,
        "--reread",
        "never",
    ]
    prefilled, stored = [], []
    subprocess.run([*arguments, "--refresh", "-q"], check=True, capture_output=True)  # warms the files
    for _ in range(rounds):
        prefilled.append(first_character([*arguments, "--no-cache"]))
        stored.append(first_character(arguments))
    report = json.loads(subprocess.run([*arguments, "--json"], check=True, capture_output=True).stdout)
    listed = subprocess.run(
        [sys.executable, "-m", "kvchat", "cache", "list", "--json"], check=True, capture_output=True
    )
    size = next(c["bytes"] for c in json.loads(listed.stdout) if c["id"] == report["cache"])
    gauge = json.loads(
        subprocess.run(
            [sys.executable, "-m", "kvchat", "ingest", *map(str, SAMPLES), "--kv", spec, "--json"],
            check=True,
            capture_output=True,
        ).stdout
    )["kv"]["in_use"]
    return {
        "kv": spec,
        "tokens": report["statistics"]["document_tokens"],
        "prefilled_s": statistics.median(prefilled),
        "stored_s": statistics.median(stored),
        "times_sooner": statistics.median(prefilled) / statistics.median(stored),
        "disk_over_gauge": size / gauge,
    }


def first_character(arguments: list[str]) -> float:
    """Seconds from the start of the process to the first character on its stdout."""
    started = time.perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return seconds


class Trials:
    """A tiny random model, a document of many segments, and the answer of a fresh reading to compare with."""

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny import VOCABULARY, tiny_model, tiny_tokenizer

        from kvchat.documents import Document
        from kvchat.models.find import Found
        from kvchat.models.load import load

        torch.set_num_threads(1)  # children are forked
        self.home = Path(tempfile.mkdtemp())
        model = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
        model.save_pretrained(self.home / "tiny")
        tiny_tokenizer().save_pretrained(self.home / "tiny")
        self.loaded = load(Found("tiny", self.home / "tiny"), "cpu")
        text = "".join(f"Crate {i * 37 % 101} holds {i * 7919 % 10007} nails.\n" for i in range(80))
        self.documents = [Document("crates.txt", text, ())]
        self.fresh = self.outcome(self.session(store=False))
        started = time.perf_counter()
        self.outcome(self.session())
        self.duration = time.perf_counter() - started

    def session(self, store: bool = True) -> Any:
        from kvchat.kv.format import parse
        from kvchat.session import Session
        from kvchat.store import Store

        kept = Store(self.home / "caches", 1 << 30) if store else None
        return Session(
            self.loaded, parse("kivi2:window=16"), self.documents, chunk=64, segment=128, store=kept
        )

    def outcome(self, session: Any) -> tuple[torch.Tensor, str]:
        from kvchat.engine import Sampling

        for _ in session.read():
            pass
        answer = "".join(session.ask("Which?", Sampling(max_tokens=8)))
        logits = session.engine._logits.clone()
        session.close()
        return logits, answer

    def check(self) -> tuple[Any, bool]:
        session = self.session()
        logits, answer = self.outcome(session)
        return session, not (torch.equal(logits, self.fresh[0]) and answer == self.fresh[1])

    def kill(self, chance: random.Random) -> dict[str, bool]:
        """Whatever the moment, what is left is usable without a word or not there."""
        shutil.rmtree(self.home / "caches", ignore_errors=True)
        child = os.fork()
        if not child:
            self.outcome(self.session())
            os._exit(0)
        time.sleep(chance.uniform(0, self.duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        session, wrong = self.check()
        return {"wrong": wrong, "unnoticed": bool(session.notes()), "reused": session.restored_tokens > 0}

    def damage(self, chance: random.Random) -> dict[str, bool]:
        """Flip a bit of a stored file, or cut its end off: a line must say so."""
        shutil.rmtree(self.home / "caches", ignore_errors=True)
        self.outcome(self.session())
        files = sorted((self.home / "caches").glob("*/*"))
        path = chance.choice([f for f in files if not f.name.startswith("documents")])
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data))
        if chance.random() < 0.5:
            data[place] ^= 1 << chance.randrange(8)
        else:
            del data[place:]
        path.write_bytes(data)
        session, wrong = self.check()
        return {"wrong": wrong, "unnoticed": not session.notes(), "reused": session.restored_tokens > 0}

    def close(self) -> None:
        shutil.rmtree(self.home)


if __name__ == "__main__":
    main()
