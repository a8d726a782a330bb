"""The sample questions in every format: how many answers are right, and how many are fp16's to the letter.

    python benchmarks/answers.py [--model smollm2-recall] [--document harbour-handbook.pdf] [--kv fp16 kivi4 ...]

An answer is right when it holds the exact answer string of sample_docs/questions.jsonl. Each question is asked of the
document alone: the conversation is rolled back in between. One JSON line a format follows the table.
"""

import argparse
import json
from pathlib import Path

from kvchat import calibrations
from kvchat.documents import read_now
from kvchat.engine import Sampling
from kvchat.kv.format import parse
from kvchat.models.find import find
from kvchat.models.load import load
from kvchat.session import Session

SAMPLES = Path(__file__).parent.parent / "sample_docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-recall")
    parser.add_argument("--document", default="harbour-handbook.pdf")
    parser.add_argument("--kv", nargs="+", default=["fp16", "kivi4", "kivi3", "kivi2"])
    parser.add_argument("--verbose", action="store_true", help="print every answer that is wrong")
    options = parser.parse_args()
    lines = (SAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [q for q in map(json.loads, lines) if q["document"] == options.document]
    documents = read_now([SAMPLES / options.document]).documents
    loaded = load(find(options.model, offline=True))
    reference: list[str] = []
    results = []
    for spec in options.kv:
        fmt = parse(spec)
        calibration = calibrations.find(loaded) if fmt.calibrated else None
        session = Session(loaded, fmt, documents, calibration=calibration)
        for usage in session.read():  # noqa: B007  # the last one counts
            pass
        answers = []
        for question in questions:
            answers.append("".join(session.ask(question["question"], Sampling(max_tokens=96))))
            session.clear()
        reference = reference or answers
        right = [q["answer"] in a for q, a in zip(questions, answers, strict=True)]
        if options.verbose:
            for question, answer, good in zip(questions, answers, right, strict=True):
                if not good:
                    print(f"{spec}: {question['question']} [{question['answer']}] {answer!r}")
        results.append(
            {
                "kv": spec,
                "true_bits": usage.true_bits,
                "cache_bytes": usage.in_use,
                "tokens": usage.tokens,
                "questions": len(questions),
                "right": sum(right),
                "same_as_first": sum(a == b for a, b in zip(answers, reference, strict=True)),
            }
        )
    print(f"{options.model} on {options.document}, {results[0]['tokens']} tokens")
    print(f"{'KV format':12} {'true bits':>9} {'cache MiB':>9} {'right':>7} {'same as ' + options.kv[0]:>13}")
    for r in results:
        print(
            f"{r['kv']:12} {r['true_bits']:9.2f} {r['cache_bytes'] / 2**20:9.1f} "
            f"{r['right']:4}/{r['questions']:<2} {r['same_as_first']:10}/{r['questions']:<2}"
        )
    for r in results:
        print(json.dumps({"model": options.model, "document": options.document, **r}))


if __name__ == "__main__":
    main()
