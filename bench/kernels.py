"""Each kernel alone: first whether it is right, then how fast: `python bench/kernels.py` on a CUDA card.

Right: against the torch function in float64, on Qwen3-0.6B and 4B head shapes, in fp32, fp16 and bf16, with NaN in all
that must not be read. Fast: the median of graph replays, over enough copies of the inputs that the cache holds none of
them, for the launch in use (*) and for others that were tried; each with its share of the measured copy bandwidth.
Kernels are compiled beforehand by --workers processes. Ends in one JSON line.
"""
import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import kernels
from kernels import TORCH, TRITON
from selector import SelectorConfig

MODELS = {"0.6B": dict(hidden=1024, heads=16, kv_heads=8, dim=128, mlp=3072, vocabulary=151936),
          "4B": dict(hidden=2560, heads=32, kv_heads=8, dim=128, mlp=9728, vocabulary=151936)}
COLD = 300e6                                                                # bytes that flush the card's cache
CASES, DONE = [], {}


def case(name):
    """Registers a function that makes the calls to time: -> (bytes one call moves, [calls over different inputs])."""
    return lambda make: CASES.append((name, make))


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def copies(nbytes):
    return max(1, min(32, math.ceil(COLD / nbytes)))


def timed(calls, repeats=9):
    """Seconds per call: the median of replays of a graph of at least 16 calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = math.ceil(16 / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return median(seconds) / rounds / len(calls)


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):
        total += tl.load(x + (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK
                         + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total))


@triton.jit
def copy_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@case("copy")
def _():
    x, y = normal(2**30), normal(2**30)
    return 2**32, [lambda: copy_kernel[(2**30 // 8192,)](x, y, 8192, num_warps=8)]


@case("read")
def _():
    x, y = normal(2**30), normal(2**17, dtype=torch.float32)
    return 2**31, [lambda: read_kernel[(2**30 // 8192 // 16,)](x, y, 8192, 16, num_warps=8)]


def attend_args(B, N, heads=16, kv_heads=8, dim=128, fast=False, logit_dtype=None, queries=1,
                dtype=torch.bfloat16, selected=2048, recent=288):
    """Arguments of attend for one step of a random cache, as attend_torch names them."""
    keys, values = (torch.empty(B, kv_heads, N, dim, device="cuda", dtype=dtype).normal_() for _ in range(2))
    compact = [normal(B, kv_heads, 4 + selected, dim, dtype=dtype) if fast or logit_dtype else None for _ in range(2)]
    row = (4 + selected, N - recent, N, 0) if fast else (0, 0, N, 1)
    return [normal(B, heads, dim, dtype=dtype), normal(B, kv_heads, dim, dtype=dtype),
            normal(B, kv_heads, dim, dtype=dtype),
            keys, values, *compact, torch.tensor([row] * B, dtype=torch.int32, device="cuda"), dim ** -0.5,
            torch.empty(B, kv_heads, N, device="cuda"),
            normal(B, 16, heads, dim, dtype=dtype) if queries > 1 else None, queries,
            torch.empty(B, kv_heads, queries * heads // kv_heads, N, device="cuda", dtype=logit_dtype)
            if logit_dtype else None,
            torch.empty(B, kv_heads, queries * heads // kv_heads, device="cuda") if logit_dtype else None, 4, 256]


def attend_case(name, B, N, tile=None, **options):
    length = "" if options.get("fast") else f" {N // 1024}K"

    @case(f"attend {name} B={B}{length} {tile or '*'}")
    def _():
        tokens = 4 + 2048 + 288 if options.get("fast") else N
        nbytes = B * 8 * tokens * 128 * 2 * 2
        sets = [attend_args(B, N, **options) for _ in range(copies(nbytes))]
        if tile is None:
            return nbytes, [lambda a=a: TRITON.attend(*a) for a in sets]
        return nbytes, [lambda a=a: kernels.launch_attend(tile, *a) for a in sets]


# (tokens of a tile, warps, stages, pieces)
for B, N in ((1, 8192), (1, 32768), (1, 131072), (4, 32768), (8, 32768), (8, 8192), (4, 131072), (6, 131072)):
    attend_case("dense", B, N)
for tile in ((128, 4, 3, 132), (64, 4, 3, 264)):
    for B, N in ((1, 131072), (4, 32768), (8, 32768), (6, 131072)):
        attend_case("dense", B, N, tile)
for B, N in ((1, 8192), (1, 131072), (4, 131072), (8, 131072)):
    attend_case("dense+logits", B, N, logit_dtype=torch.bfloat16)
    attend_case("dense+8 queries", B, N, logit_dtype=torch.bfloat16, queries=8)
for tile, B in itertools.product((None, (64, 4, 3, 264), (64, 4, 3, 528), (64, 4, 3, 1056), (64, 4, 3, 2112)), (1, 6)):
    attend_case("dense+logits 4B", B, 131072, tile, logit_dtype=torch.bfloat16, heads=32)
    attend_case("dense+8 queries 4B", B, 131072, tile, logit_dtype=torch.bfloat16, queries=8, heads=32)
for B in (1, 4, 6, 8):
    attend_case("fast", B, 8192, fast=True)
    for tile in ((64, 4, 3, 264), (32, 4, 3, 256), (32, 2, 3, 528), (128, 4, 3, 132)):
        attend_case("fast", B, 8192, tile, fast=True)


def linear_case(model, role, M, O, I, how, gated=False, tile=None):
    @case(f"{model} {role} M={M} {how}")
    def _():
        weights = O * I * 2 * (2 if gated else 1)
        x, norm, residual = normal(M, I), normal(I), normal(M, O) if role in ("o", "down") else None
        ws = [normal(O * (2 if gated else 1), I) for _ in range(copies(weights))]
        normed = role in ("qkv", "gate_up", "head")
        def call(w):
            if how == "cublas":
                y = TRITON.rms_norm(x, norm, 1e-6) if normed else x
                if residual is not None:
                    return torch.addmm(residual, y, w.T)
                y = F.linear(y, w)
                if gated:
                    out = x.new_empty(M, O)
                    kernels.silu_mul_kernel[(M, triton.cdiv(O, 1024))](y, out, O, 1024, **kernels.early(x.device))
                return y
            if tile is None:
                return (TRITON.swiglu(x, w, norm, 1e-6) if gated
                        else TRITON.linear(x, w, norm if normed else None, 1e-6, residual))
            fused = normed and tile[0] == "reduce" and tile[-1] == "fused"
            y = TRITON.rms_norm(x, norm, 1e-6) if normed and not fused else x
            return kernels.launch_linear(tile[:5], y, w, norm if fused else None, 1e-6, residual, gated)
        return weights, [lambda w=w: call(w) for w in ws]


for model, c in MODELS.items():
    roles = {"qkv": ((c["heads"] + 2 * c["kv_heads"]) * c["dim"], c["hidden"]),
             "o": (c["hidden"], c["heads"] * c["dim"]),
             "gate_up": (c["mlp"], c["hidden"]), "down": (c["hidden"], c["mlp"]),
             "head": (c["vocabulary"], c["hidden"])}
    for role, (O, I) in roles.items():
        for M in (1, 2, 4, 6, 8):
            gated = role == "gate_up"
            linear_case(model, role, M, O, I, "cublas", gated)
            linear_case(model, role, M, O, I, "*", gated)
            tiles = {1: [("reduce", 8, 512, 4, 3, "fused"), ("reduce", 4, 1024, 4, 3, "fused"),
                         ("reduce", 4, 512, 4, 4, "fused"),
                         ("reduce", 16, 256, 4, 4, "fused"), ("reduce", 8, 512, 4, 3)],
                     2: [("reduce", 4, 512, 4, 3, "fused"), ("reduce", 4, 512, 4, 3), ("dot", 32, 128, 4, 4),
                         ("dot", 16, 256, 4, 4)],
                     4: [("reduce", 4, 512, 4, 3, "fused"), ("reduce", 4, 512, 4, 3), ("reduce", 2, 1024, 4, 3),
                         ("dot", 32, 128, 4, 4),
                         ("dot", 16, 256, 4, 4)],
                     6: [("reduce", 2, 512, 4, 3), ("dot", 32, 128, 4, 4), ("dot", 64, 128, 4, 4),
                         ("dot", 16, 256, 4, 4)],
                     8: [("reduce", 2, 512, 4, 3), ("dot", 32, 128, 4, 4), ("dot", 64, 128, 4, 4),
                         ("dot", 16, 256, 4, 4)]}[M]
            for tile in tiles:
                if not (role == "head" and tile[:2] == ("dot", 16)):
                    linear_case(model, role, M, O, I, " ".join(map(str, tile)), gated, tile)

for (model, c), M, (kind, ops) in itertools.product(MODELS.items(), (1, 8, 2048), (("", TRITON), (" torch", TORCH))):
    @case(f"{model} rms_norm M={M}{kind}")
    def _(c=c, M=M, ops=ops):
        xs, w = [normal(M, c["hidden"]) for _ in range(8)], normal(c["hidden"])
        return M * c["hidden"] * 4, [lambda x=x: ops.rms_norm(x, w, 1e-6) for x in xs]

    @case(f"{model} qk_norm_rope M={M}{kind}")
    def _(c=c, M=M, ops=ops):
        H, G, D = c["heads"], c["kv_heads"], c["dim"]
        qkv, tables = normal(M, (H + 2 * G) * D), [normal(4096, D // 2) for _ in range(2)]
        norms, positions = [normal(D) for _ in range(2)], torch.arange(M, device="cuda")
        return M * (H + G) * D * 4, [lambda: ops.qk_norm_rope(qkv, G, *norms, *tables, positions, 1e-6)] * 8


def publish_args(n, B, N, rows, spread, G=8, D=128, K=2048):
    keys, values = (torch.empty(n, B, G, N, D, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    logits = normal(n, B, G, rows, N).mul_(2)
    return [logits, logits[..., 4 : N - 256].float().logsumexp(-1), keys.float().norm(dim=-1) if n * B * N < 2**19
            else normal(n, B, G, N, dtype=torch.float32).abs_().add_(9),
            keys, values, torch.tensor([(0, 0, N, 1)] * B, dtype=torch.int32, device="cuda"), 4, 256,
            SelectorConfig(spread=8, alpha=2.0) if spread else SelectorConfig(),
            torch.zeros(n, B, G, K, dtype=torch.int64, device="cuda"), *(normal(n, B, G, 4 + K, D) for _ in range(2))]


def publish_case(n, B, N, rows, spread=False):
    name = f"n={n} B={B} {N // 1024}K R={rows}{' spread' if spread else ''}"
    logits = n * B * 8 * N * rows * 2

    @case(f"publish {name}")
    def _():
        args = publish_args(n, B, N, rows, spread)
        return logits, [lambda: TRITON.publish(*args)]

    @case(f"scores {name}")
    def _():
        args = publish_args(n, B, N, rows, spread)
        return logits, [lambda: kernels.scores_triton(*args[:3], *args[5:9])]

    def scores():                                                           # like log-probabilities
        return torch.randn(n, B, 8, N, dtype=torch.float64 if spread else torch.float32, device="cuda") * 2 - 12

    @case(f"top {name}")
    def _():
        x, plan = scores(), torch.tensor([(0, 0, N, 1)] * B, dtype=torch.int32, device="cuda")
        positions = torch.empty(n, B, 8, 2048, dtype=torch.int64, device="cuda")
        extent = torch.stack(x.unflatten(-1, (-1, 1024)).aminmax(dim=-1), -1)
        return x.nbytes, [lambda: kernels.top_triton(x, extent, plan, 0, 0, positions)]

    @case(f"torch.topk, torch.sort {name}")
    def _():
        x = scores()
        return x.nbytes, [lambda: x.topk(2048, sorted=False).indices.int().sort(-1)]


for n, B, N in ((1, 1, 32768), (1, 1, 131072), (7, 1, 8192), (7, 1, 32768), (7, 1, 131072), (7, 4, 32768),
                (7, 8, 131072)):
    publish_case(n, B, N, 2)
publish_case(7, 1, 131072, 4)
publish_case(7, 1, 131072, 16, True)
publish_case(7, 1, 131072, 32, True)


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def error(got, want):
    finite = want.isfinite()
    if got.isnan().any() or not torch.equal(got.isfinite(), finite):
        return float("inf")
    return float((got.double() - want)[finite].norm() / want[finite].norm())


def check(name, value, bound):
    DONE.setdefault("checks", []).append([name, value, value <= bound])
    print(f"{'PASS' if value <= bound else 'FAIL'} {name:60} error {value:.1e}, bound {bound:.0e}", flush=True)


def check_attend(dtype, heads, queries, bound):
    plan = [(0, 0, 5000, 1), (2052, 3000, 4001, 0), (0, 0, 1, 0), (20, 4096, 4097, 0), (0, 0, 4095, 1)]
    args = attend_args(len(plan), 5120, heads, logit_dtype=dtype, queries=queries, dtype=dtype)
    args[7] = torch.tensor(plan, dtype=torch.int32, device="cuda")
    for b, (compact, start, end, _) in enumerate(plan):
        for x in args[3:5]:
            x[b, :, :start], x[b, :, end - 1 :] = float("nan"), float("nan")
        for x in args[5:7]:
            x[b, :, compact:] = float("nan")
    twin = [wide(x.clone()) if isinstance(x, torch.Tensor) else x for x in args]
    for x in (args[12], twin[12]):
        x.fill_(7)
    got, want = TRITON.attend(*args), TORCH.attend(*twin)
    name = f"attend {str(dtype)[6:]} {heads} heads, {queries} queries"
    check(name, error(got, want), bound)
    check(f"{name}, logits", error(args[12], twin[12]), bound)
    slow = args[7][:, 3] > 0
    check(f"{name}, lse", error(args[13][slow], twin[13][slow]), 1e-5)
    stored = all(torch.isclose(args[i].double(), twin[i], rtol=1e-6, equal_nan=True).all() for i in (3, 4, 9))
    check(f"{name}, stored", 0.0 if stored else 1.0, 0)


def check_publish(rows, spread):
    args = publish_args(2, 3, 9000, rows, spread)
    args[5] = torch.tensor([(0, 0, 9000, 1), (2052, 7000, 8000, 0), (0, 0, 1500, 1)], dtype=torch.int32, device="cuda")
    args[0] = args[0].float()
    args[1][:, 2] = args[0][:, 2, ..., 4 : 1500 - 256].logsumexp(-1)
    twin = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    twin[0], twin[2] = twin[0].double(), twin[2].double()
    TRITON.publish(*args)
    TORCH.publish(*twin)
    lost = sum(1 for a, b in zip(args[9].flatten(0, 2).tolist(), twin[9].flatten(0, 2).tolist()) for p in a
               if p not in set(b))
    check(f"publish {rows} rows{' spread' if spread else ''}: positions that differ", lost / args[9].numel(), 1e-4)
    kept = args[9][0, 0, 0]
    copied = torch.equal(args[10][0, 0, 0, 4:], args[3][0, 0, 0][kept]) and torch.equal(
        args[11][0, 0, 0, 4:], args[4][0, 0, 0][kept])
    check(f"publish {rows} rows: copied exactly", 0.0 if copied else 1.0, 0)


def check_linear(dtype, c, M, bound):
    x, norm = normal(M, c["hidden"], dtype=dtype), normal(c["hidden"], dtype=dtype)
    w, both = (normal(n, c["hidden"], dtype=dtype).div_(32) for n in (4096, 2 * c["mlp"]))
    *args, residual = x, w, norm, 1e-6, normal(M, 4096, dtype=dtype)
    got = TRITON.linear(*args, residual.clone())                            # which may be written over
    want = TORCH.linear(*map(wide, (*args, residual)))
    check(f"linear {str(dtype)[6:]} {M} x {c['hidden']}", error(got, want), bound)
    args = (x, both, norm, 1e-6)
    check(f"swiglu {str(dtype)[6:]} {M} x {c['hidden']}", error(TRITON.swiglu(*args), TORCH.swiglu(*map(wide, args))),
          2 * bound)


def check_rope(dtype, c, bound):
    H, G, D = c["heads"], c["kv_heads"], c["dim"]
    args = (normal(5, (H + 2 * G) * D, dtype=dtype), G, normal(D, dtype=dtype), normal(D, dtype=dtype),
            *(normal(64, D // 2, dtype=dtype) for _ in range(2)), torch.arange(5, device="cuda") * 7, 1e-6)
    for part, a, b in zip("qkv", TRITON.qk_norm_rope(*args), TORCH.qk_norm_rope(*map(wide, args))):
        check(f"qk_norm_rope {str(dtype)[6:]} {H} heads, {part}", error(a, b), bound)


CHECKS = []
for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)):
    CHECKS += [partial(check_attend, dtype, heads, queries, bound) for heads in (16, 32) for queries in (1, 8)]
    CHECKS += [partial(check_linear, dtype, c, M, bound) for c in MODELS.values() for M in (1, 2, 4, 6, 8, 64)]
    CHECKS += [partial(check_rope, dtype, c, bound) for c in MODELS.values()]
CHECKS += [partial(check_publish, *what) for what in ((2, False), (16, True), (4, False))]


def compile_ahead(workers):
    """Let each worker run its share of the cases once, which leaves the compiled kernels in Triton's cache."""
    start = time.time()
    command = [sys.executable, __file__, "--workers", str(workers)]
    runs = [subprocess.Popen([*command, "--worker", str(i)], stdout=subprocess.DEVNULL) for i in range(workers)]
    print(f"compiled by {workers} processes: exit codes {set(r.wait() for r in runs)}, {time.time() - start:.0f} s",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="time only cases whose name contains this")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels: no CUDA device here")
    cases = [(name, make) for name, make in CASES if options.only in name or name in ("copy", "read")]
    if options.worker is not None:
        small = [(name, make) for name, make in cases if "B=8 128K" not in name and "head" not in name]
        for run in ([lambda make=make: make()[1][0]() for _, make in small]
                    + CHECKS)[options.worker :: options.workers]:
            run()
            torch.cuda.synchronize()
        return
    compile_ahead(options.workers)
    for run in [] if options.skip_checks else CHECKS:
        run()
    print(f"\n{'case':52} {'us':>9} {'TB/s':>7} {'of copy':>8}")
    for name, make in cases:
        try:
            nbytes, calls = make()
            seconds = timed(calls)
        except Exception as problem:                                        # one case must not cost the others
            print(f"{name:52} {type(problem).__name__}: {str(problem)[:80].partition(chr(10))[0]}", flush=True)
            continue
        if name == "copy":
            DONE["copy"] = nbytes / seconds
        DONE[name] = seconds * 1e6 if name not in ("copy", "read") else nbytes / seconds
        share = nbytes / seconds / DONE["copy"]
        print(f"{name:52} {seconds * 1e6:9.1f} {nbytes / seconds / 1e12:7.2f} {share:8.1%}", flush=True)
        del calls
    print(json.dumps({name: value if isinstance(value, list) else float(f"{value:.4g}")
                      for name, value in DONE.items()}))


if __name__ == "__main__":
    main()
