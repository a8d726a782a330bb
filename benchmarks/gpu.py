"""Attention straight from packed codes on a GPU: each kernel checked against float64, then timed against the best fp16.

    PYTHONPATH=FOLDER python benchmarks/gpu.py [--group 32] [--bits 2 3 4] [--lengths ...] [--shapes ...] [--sweep]

Needs torch, triton and `kvchat_kernels` (the folder kernels/, installed with kvchat or linked by that name), no model and no
network. Prints a table and one JSON line a case. Times are medians by CUDA events over CUDA graphs, with the L2 cache flushed
before each run. fp16 is torch's scaled_dot_product_attention at its best: every backend that takes the shape, query heads
that share a key head folded into rows or not, the keys cut into several batch entries or not. `--sweep` times other cuts of
the work (`triton_attend.plan`) and prints the best ones. Ends with 1 if any output is wrong.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from kvchat_kernels import torch_pack, triton_attend, triton_pack
from kvchat_kernels.reference import Packed
from kvchat_kernels.triton_attend import Plan
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {  # query heads, key heads, head_dim
    "llama-2-7b": (32, 32, 128),
    "llama-3.1-8b": (32, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
LENGTHS = (4096, 32768, 131072, 524288, 1048576)
WORST = 1e-2
"""Largest error: of outputs relative to their norm, of the LSE absolute."""


def microseconds(call: Callable[[], object], budget: float = 0.15) -> float:
    """Median time on the GPU of what `call` launches, each time with cold caches; `budget` is seconds in all, about."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    while len(times) < 50 and (len(times) < 7 or sum(times) < budget * 1e3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy too large for any cache."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # a kernel: a copy inside a graph goes to the copy engine, which is slower
    return 2 * source.nbytes / microseconds(lambda: torch.bitwise_not(source, out=target)) * 1e6


def packed(heads: int, length: int, dim: int, bits: int, axis: str, group: int) -> Packed:
    """Random codes and scales that stand for numbers of about unit size; nothing of 16 bits is ever made."""
    shape = (length // group, dim) if axis == "channel" else (length, math.ceil(dim / group))
    scale = (torch.rand(heads, *shape, device="cuda") + 0.5) * (3.4 / 2**bits)
    zero = (torch.randn(heads, *shape, device="cuda") * 0.3 - scale * (2**bits - 1) / 2).half()
    codes = torch.randint(0, 256, (heads, length, dim * bits // 8), dtype=torch.uint8, device="cuda")
    return Packed(codes, scale.half(), zero, bits, axis, group)


def nbytes(*parts: Packed) -> int:
    return sum(p.codes.nbytes + p.scale.nbytes + p.zero.nbytes for p in parts)


def exact(query: Tensor, key: Packed, value: Packed, scaling: float) -> tuple[Tensor, Tensor]:
    """`reference.attention_packed` in float64, some thousand tokens at a time."""
    kv_heads, length, _ = key.codes.shape
    heads, count, dim = query.shape
    q = query.double().reshape(kv_heads, -1, dim)
    chunk = min(length, max(128, (1 << 27) // (kv_heads * dim) // 128 * 128))
    pieces = []
    for start in range(0, length, chunk):
        tensors = []
        for p in (key, value):
            rows = p.group if p.axis == "channel" else 1
            parts = (
                p.codes[:, start : start + chunk],
                *(t[:, start // rows : (start + chunk) // rows] for t in p[1:3]),
            )
            tensors.append(torch_pack.dequantize(*parts, p.bits, p.axis, p.group, torch.float32).double())
        scores = q @ tensors[0].transpose(1, 2) * scaling
        lse = scores.logsumexp(-1)
        pieces.append(((scores - lse[..., None]).exp() @ tensors[1], lse))
    outputs, lses = (torch.stack(t) for t in zip(*pieces, strict=True))
    lse = lses.logsumexp(0)
    output = ((lses - lse).exp()[..., None] * outputs).sum(0)
    return output.reshape(heads, count, dim), lse.reshape(heads, count)


def errors(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> tuple[float, float]:
    output, lse = got
    return (
        float((output - wanted[0]).norm() / wanted[0].norm()),
        float((lse - wanted[1]).abs().max()),
    )


def dense_arrangements(
    query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to ask torch for the attention of one query token [Hq, 1, D] over fp16 keys and values [Hkv, S, D]."""
    heads, _, dim = query.shape
    kv_heads, length, _ = key.shape
    sdpa = torch.nn.functional.scaled_dot_product_attention
    folded = query.view(1, kv_heads, heads // kv_heads, dim)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = backend.name.split("_")[0].lower()

        def heads_as_they_are(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return sdpa(query[None], key[None], value[None], enable_gqa=heads != kv_heads)

        def heads_folded(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return sdpa(folded, key[None], value[None])

        yield f"{name}", heads_as_they_are
        yield f"{name}, folded", heads_folded
    for parts in (4, 8, 16, 32, 64, 128):
        k, v = (t.view(kv_heads, parts, length // parts, dim).transpose(0, 1) for t in (key, value))

        def split(k: Tensor = k, v: Tensor = v, parts: int = parts) -> object:
            q = folded.expand(parts, -1, -1, -1)
            output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
            weight = lse.float().softmax(0)[..., None]
            return (output * weight).sum(0)

        yield f"flash, folded, {parts} parts", split


def best_dense(heads: int, kv_heads: int, dim: int, length: int) -> tuple[float, str]:
    """Microseconds of the quickest fp16 attention, and which it is."""
    query = torch.randn(heads, 1, dim, device="cuda", dtype=torch.float16)
    key, value = (
        torch.empty(kv_heads, length, dim, device="cuda", dtype=torch.float16).normal_() for _ in range(2)
    )
    best = (math.inf, "none ran")
    for name, call in dense_arrangements(query, key, value):
        try:
            best = min(best, (microseconds(call, budget=0.05), name))
        except RuntimeError:  # this backend does not take the shape
            torch.cuda.synchronize()
    return best


def case(
    name: str, length: int, bits: int, group: int
) -> tuple[Callable[[], tuple[Tensor, Tensor]], Tensor, Packed, Packed]:
    heads, kv_heads, dim = SHAPES[name]
    torch.manual_seed(0)
    # attention that looks somewhere: spread evenly over a million random values, it would sum to nothing but rounding
    query = 3 * torch.randn(heads, 1, dim, device="cuda").to(torch.bfloat16)
    key = packed(kv_heads, length, dim, bits, "channel", group)
    value = packed(kv_heads, length, dim, bits, "token", group)
    return lambda: triton_attend.attention_packed(query, key, value, dim**-0.5), query, key, value


def table(options: argparse.Namespace) -> bool:
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, group {options.group}, copy {bandwidth / 1e12:.2f} TB/s"
    )
    print(
        "us: one decode step of one layer; fp16: the best arrangement; limit: bytes of fp16 over bytes packed"
    )
    print(
        f"{'shape':14} {'tokens':>8} {'bits':>4} {'us':>9} {'fp16 us':>9} {'faster':>7} {'limit':>6} {'of copy':>8} "
        f"{'host us':>8} {'output':>8} {'lse':>8}  fp16 by"
    )
    lines, good = [], True
    for name, length in itertools.product(options.shapes, options.lengths):
        heads, kv_heads, dim = SHAPES[name]
        dense, how = best_dense(heads, kv_heads, dim, length)
        torch.cuda.empty_cache()
        for bits in options.bits:
            call, query, key, value = case(name, length, bits, options.group)
            off = errors(call(), exact(query, key, value, dim**-0.5))
            right = max(off) < WORST
            good &= right
            us = microseconds(call)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                call()
            host = (time.perf_counter() - started) / 10 * 1e6
            torch.cuda.synchronize()
            total = nbytes(key, value)
            dense_bytes = 4 * kv_heads * length * dim
            share = total / us * 1e6 / bandwidth
            print(
                f"{name:14} {length:8} {bits:4} {us:9.1f} {dense:9.1f} {dense / us:7.2f} {dense_bytes / total:6.2f} "
                f"{share:8.0%} {host:8.0f} {off[0]:8.1e} {off[1]:8.1e}  {how}{'' if right else '  WRONG'}",
                flush=True,
            )
            line = {
                "shape": name,
                "tokens": length,
                "bits": bits,
                "group": options.group,
                "us": us,
                "fp16_us": dense,
            }
            line |= {
                "fp16_by": how,
                "bytes": total,
                "of_copy": share,
                "host_us": host,
                "output_error": off[0],
            }
            lines.append(line | {"lse_error": off[1], "right": right})
            del call, query, key, value
            torch.cuda.empty_cache()
    for line in lines:
        print(json.dumps(line))
    return good


def check_pack(options: argparse.Namespace) -> bool:
    """Packing a block gives the same bits as the torch path; how long one layer's block takes."""
    good = True
    for bits, axis in itertools.product(options.bits, ("channel", "token")):
        x = (torch.randn(8, 2048, 128, device="cuda") * 3 + 10 * torch.randn(128, device="cuda")).to(
            torch.bfloat16
        )
        call = lambda x=x, bits=bits, axis=axis: triton_pack.quantize(x, bits, axis, options.group)  # noqa: E731
        # on a CPU, where torch divides by a number as IEEE says; on a GPU it multiplies by the reciprocal
        wanted = torch_pack.quantize(x.cpu(), bits, axis, options.group)
        same = all(torch.equal(got.cpu(), right) for got, right in zip(call(), wanted, strict=True))
        torch_us = microseconds(
            lambda x=x, bits=bits, axis=axis: torch_pack.quantize(x, bits, axis, options.group)
        )
        line = {"pack": axis, "bits": bits, "us": microseconds(call), "torch_us": torch_us, "right": same}
        print(json.dumps(line), flush=True)
        good &= same
    return good


def check_variants(options: argparse.Namespace) -> bool:
    """What the table leaves out: other head sizes, chunks of queries, keys before RoPE, softcap, mixed bits."""
    good = True
    for dim, count, rope, softcap in [
        (64, 1, True, None), (80, 1, False, None), (96, 3, True, None), (128, 512, False, None), (128, 33, True, 30.0), (256, 2, False, 50.0),
    ]:  # fmt: skip
        for bits in zip(options.bits, (*options.bits[1:], options.bits[0]), strict=True):
            key = packed(2, 1024, dim, bits[0], "channel", options.group)
            value = packed(2, 1024, dim, bits[1], "token", options.group)
            query = torch.randn(8, count, dim, device="cuda").half()
            angle = torch.rand(1024, dim // 2, device="cuda").mul(6.3).repeat(1, 2)
            angles = (angle.cos(), angle.sin()) if rope else None
            got = triton_attend.attention_packed(query, key, value, dim**-0.5, rope=angles, softcap=softcap)
            wanted = _reference(query, key, value, dim**-0.5, angles, softcap)
            off = errors(got, wanted)
            if not max(off) < WORST:
                print(
                    f"WRONG: {dim=} {count=} {rope=} {softcap=} {bits=}: output {off[0]:.1e}, lse {off[1]:.1e}"
                )
                good = False
    print(
        "other head sizes, chunks, pre-RoPE, softcap, mixed bits:", "right" if good else "WRONG", flush=True
    )
    return good


def _reference(
    query: Tensor,
    key: Packed,
    value: Packed,
    scaling: float,
    rope: tuple[Tensor, Tensor] | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    k, v = (torch_pack.dequantize(*p, torch.float32).double() for p in (key, value))
    if rope is not None:
        first, second = k.chunk(2, -1)
        k = k * rope[0].double() + torch.cat([-second, first], -1) * rope[1].double()
    k, v = (t.repeat_interleave(query.shape[0] // t.shape[0], 0) for t in (k, v))
    scores = query.double() @ k.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


# --- sweep --------------------------------------------------------------------------------------------------------


def cuts() -> Iterator[Plan]:
    """Tiles and Triton's settings to try, at 2,048 tokens a split."""
    for block_n, stages, registers in itertools.product((32, 64, 128), (1, 2, 3, 4), (None, 168, 128)):
        yield Plan(16, block_n, 2048, 1, stages, registers)


def split_for(programs: int, tokens: int, group: int, cut: Plan) -> int:
    """Tokens a split that make about `programs` programs an SM out of `tokens` of all key heads."""
    unit = max(group, cut.block_n)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return max(1, round(tokens / (processors * programs) / unit)) * unit


def compile_one(job: tuple[str, int, int, Plan]) -> None:
    """In a process of its own, so that many compile at once; Triton's cache on disk hands the result over."""
    name, bits, group, cut = job
    triton_attend.plan = lambda *_: cut  # type: ignore[assignment]
    try:
        case(name, 4096, bits, group)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # this cut needs more than the machine has
        print(f"{job}: {type(error).__name__}", file=sys.stderr)


def sweep(options: argparse.Namespace) -> None:
    plan = triton_attend.plan
    jobs = [(n, b, options.group, cut) for n in options.shapes for b in options.bits for cut in cuts()]
    started = time.perf_counter()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))
    print(f"compiled {len(jobs)} cuts in {time.perf_counter() - started:.0f} s", flush=True)
    for name, length, bits in itertools.product(options.shapes, options.lengths, options.bits):
        if time.perf_counter() - started > options.minutes * 60:
            print("out of time; take fewer --shapes, --lengths or --bits")
            break
        call, *tensors = case(name, length, bits, options.group)
        _, kv_heads, _ = SHAPES[name]
        found: list[tuple[float, Plan]] = []

        def measure(
            cut: Plan, call: Callable[[], object] = call, found: list[tuple[float, Plan]] = found
        ) -> None:
            triton_attend.plan = lambda *_: cut  # type: ignore[assignment]
            try:
                found.append((microseconds(call, budget=0.01), cut))
            except Exception:
                torch.cuda.synchronize()

        for cut in cuts():
            measure(cut._replace(split=split_for(16, length * kv_heads, options.group, cut)))
        for _, cut in sorted(found, key=lambda item: item[0])[:3]:
            for programs in (4, 6, 8, 12, 24, 32, 48):
                measure(cut._replace(split=split_for(programs, length * kv_heads, options.group, cut)))
        triton_attend.plan = plan
        measured = microseconds(call)
        print(f"{name} {length} {bits} bits: plan() {measured:.1f} us; best:", flush=True)
        for us, cut in sorted(found, key=lambda item: item[0])[:4]:
            print(
                f"    {us:8.1f} us  block_n {cut.block_n} warps {cut.warps} stages {cut.stages} split {cut.split}"
            )
            print(json.dumps({"shape": name, "tokens": length, "bits": bits, "us": us, **cut._asdict()}))
        del call, tensors, found
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--bits", nargs="+", type=int, choices=(2, 3, 4), default=(2, 3, 4))
    parser.add_argument(
        "--group", type=int, choices=(32, 64, 128), default=32, help="tokens or channels that share a scale"
    )
    parser.add_argument("--sweep", action="store_true", help="try other cuts of the work instead")
    parser.add_argument("--minutes", type=float, default=7, help="of a sweep")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile for a sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; benchmarks/cpu.py measures without one")
    torch.set_grad_enabled(False)
    if options.sweep:
        sweep(options)
        return
    good = check_variants(options)
    good &= check_pack(options)
    good &= table(options)
    if not good:
        sys.exit("wrong results, see above")


if __name__ == "__main__":
    main()
