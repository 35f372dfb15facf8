"""How fast the steps are, and what share of the memory's bandwidth they reach: `python bench/speed.py` on a CUDA card.

A model is slow in two ways. Both prefill and decoding do 2 x parameters operations per token. Prefill does them for
all tokens at once: a weight that has been read serves thousands of tokens, so arithmetic is the limit. A decode step
does them for B tokens only, and yet reads every weight, and the keys and values that each sequence attends to: so
bandwidth is the limit, and no step takes less than (weights + KV bytes) / bandwidth. Slow-Fast Inference makes the
second term small. Each step's time therefore stands beside the bytes it has to read and the share that it reaches of
two ceilings, measured first: copying (bytes read + written) and reading. What a slow step's Selector reads and writes
is not counted as useful: it is what SFI costs.

Weights and caches are random, on the device. A step's time is the median of graph replays between CUDA events, with
its quartiles; a slow step ends when its selections are in place. Decoding is wall clock per token of `sfi.decode` with
all host work, the median of stretches of one slow step each. Full KV, the baseline, has the same kernels and graphs. A
fast step is timed half-way between two slow ones that are 64 apart: with 256 + 32 recent tokens. Paper: its throughput
section.
`--smoke` runs all of it on a CPU with toy shapes, to try the program itself.
"""
import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from timeit import timeit
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import triton
import triton.language as tl

import kernels
import model as qwen3
from cli import PRESET, RETAIN, speed
from sfi import FullMemory, SFIConfig, SlowFastMemory, Stepper, decode, generate, prefill


def shape(hidden, intermediate, layers, heads, kv_heads=8, head_dim=128, vocabulary=151936, positions=131072 + 1024):
    """The config.json of a Qwen3 with tied embeddings."""
    return dict(model_type="qwen3", hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary,
                max_position_embeddings=positions, rms_norm_eps=1e-6, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6})


# What is measured. `tokens` per decode loop, `written` on text, attention (B, H, G, D, N), `buffer` floats to copy.
GPU = SimpleNamespace(
    models={"4B": shape(2560, 9728, 36, 32), "0.6B": shape(1024, 3072, 28, 16)},
    batches={"4B": (1, 4, 6), "0.6B": (1, 4, 8)}, contexts={"8K": 8192, "32K": 32768, "128K": 131072}, knobs={},
    attention=(16, 32, 8, 128, 16384), repeats=15, tokens=256, written=512, buffer=2**29,
    device="cuda", dtype=torch.bfloat16)
toy = partial(shape, 64, 96, kv_heads=2, head_dim=16, vocabulary=512, positions=1024)
SMOKE = SimpleNamespace(
    models={"4B": toy(3, 8), "0.6B": toy(2, 4)}, batches={"4B": (1, 2, 3), "0.6B": (1, 2, 3)},
    contexts={"8K": 96, "32K": 160, "128K": 320}, knobs=dict(recent=16, selected=32),
    attention=(2, 8, 2, 16, 128), repeats=3, tokens=128, written=16, buffer=2**16, device="cpu", dtype=torch.float32)

# The paper's speedup of attention alone by the share of tokens kept, in per cent.
PAPER = {1.6: 10.67, 6.3: 9.56, 12.5: 7.15, 25: 3.96, 37.5: 2.75, 50: 2.10, 75: 1.43, 100: 1.00}

# What we set out to reach on an H200: one time over another, or a step's share of the copy bandwidth; model, context,
# what is required and what is aimed at, per batch size. A slow step's time is better small, all else is better large.
TARGETS = [
    ("full", "share", "0.6B", "128K", (0.80, 0.90, 0.90), (0.91, 1.0, 1.0)),
    ("full", "share", "4B", "128K", (0.82, 0.90, 0.90), (0.91, 1.0, 1.0)),
    ("fast", "share", "0.6B", "128K", (0.33, 0.36, 0.43), (0.45, 0.50, 0.57)),
    ("fast", "share", "4B", "128K", (0.62, 0.59, 0.58), (0.75, 0.72, 0.70)),
    *(("slow", "full", name, context, (1.35, *many), (1.2, 1.2, 1.2)) for name in ("0.6B", "4B")
      for context, many in (("8K", ()), ("32K", (1.45, 1.45)), ("128K", (1.45, 1.45)))),
    *(("slow, robust", "full", name, context, (1.6, 1.6, 1.6), (1.35, 1.35, 1.35)) for name in ("0.6B", "4B")
      for context in ("32K", "128K")),
    ("decode full", "decode 1 in 32", "0.6B", "128K", (3.5, 7.0, 9.3), (4.5, 9, 12)),
    ("decode full", "decode 1 in 64", "0.6B", "128K", (None, None, 11), (None, None, 14.4)),
    ("decode full", "decode 1 in 64", "4B", "128K", (None, None, 6), (None, None, 8)),
    ("decode full", "decode 1 in 32", "0.6B", "32K", (1.6, 2.7, 3.7), (1.8, 3.2, 4.5)),
    ("decode full", "decode 1 in 32", "4B", "32K", (1.2, 1.85, 2.2), (1.35, 2.1, 2.6)),
    ("HF dynamic", "decode full", "4B", "128K", (10,), (11,)),
    ("HF dynamic", "decode 1 in 32", "4B", "128K", (24,), (30,)),
]


class Report:
    """All that was measured, as one dictionary, and the model at hand. The file is written after every job."""

    def __init__(self, scale, path, minutes):
        self.scale, self.path, self.begin, self.budget, self.held = scale, path, time.monotonic(), 60 * minutes, {}
        self.data = {"steps": {}, "memory": {}, "prefill": {}, "attention": {}, "text": {}, "not run": [], "failed": {}}

    def model(self, name):
        """The random model of that name; only one at a time is on the device."""
        if name not in self.held:
            self.held.clear()
            config = qwen3.Config.from_json(self.scale.models[name])
            self.held[name] = qwen3.Qwen3.random(config, self.scale.device, self.scale.dtype)
        return self.held[name]

    def job(self, title, seconds, measure, *arguments):
        """measure(self, *arguments), which prints and fills in `data`, if about so many seconds are left."""
        left = self.budget - (time.monotonic() - self.begin)
        if left < seconds:
            self.data["not run"].append(title)
            print(f"{title}: not run, {left:.0f} s are left and it may need {seconds}", flush=True)
        else:
            self.attempt(title, partial(measure, self, *arguments))
        self.path.write_text(self.line() + "\n")

    def attempt(self, title, measure):
        """Run measure(). Whatever goes wrong, such as memory, is noted and costs only its own figures."""
        try:
            gc.collect()
            torch.cuda.empty_cache()
            measure()
        except Exception as error:
            self.data["failed"][title] = f"{type(error).__name__}: {error}"[:300]
            print(f"{title}: FAILED, {self.data['failed'][title]}", flush=True)

    def line(self):
        return json.dumps(self.data)

    def cells(self, name, context, batch):
        """Figures of one model, context and batch size: {what was timed: dict with its ms}."""
        return self.data["steps"].setdefault(title_of(name, context, batch), {})

    def ratio(self, over, under, *row):
        """One time over another, or one's share of the copy bandwidth; None where one was not run or has failed."""
        cells = self.cells(*row)
        if over not in cells or under not in {"share", *cells}:
            return None
        return cells[over]["copy_share"] if under == "share" else cells[over]["ms"] / cells[under]["ms"]


def title_of(name, context, batch):
    return f"{name} {context} B={batch}"


def timed(run, repeats):
    """Milliseconds of each of `repeats` runs, after two to warm up; queued, so that no gap waits for the host."""
    run(), run()
    if not torch.cuda.is_available():
        return [1000 * timeit(run, number=1) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def spread(milliseconds):
    """Quartiles of some times."""
    low, middle, high = (round(x, 4) for x in quantiles(milliseconds, n=4, method="inclusive"))
    return dict(ms=middle, low=low, high=high)


def gigabytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors) / 1e9


@triton.jit
def read_kernel(x, out, LOOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program sums LOOPS blocks of x and stores one number."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(LOOPS):
        total += tl.load(x + (program * LOOPS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))


@torch.inference_mode()
def measure_ceilings(report):
    """TB/s of the best of two copies, and of the best of a few reads. A copy_ captured in a graph would become a memcpy
    node, a third slower: no ceiling."""
    x = torch.randn(report.scale.buffer, device=report.scale.device)
    y = torch.empty_like(x)
    copies, reads = [lambda: y.copy_(x), lambda: torch.add(x, 1, out=y)], [lambda: x.sum()]
    if x.is_cuda:
        reads += [partial(read_kernel[(x.numel() // (loops * block),)], x, y, loops, block, num_warps=warps)
                  for loops in (8, 32) for block, warps in ((4096, 4), (8192, 8))]
    copy, read = (min(median(timed(run, report.scale.repeats)) for run in runs) for runs in (copies, reads))
    report.data["ceilings"] = dict(copy=2 * gigabytes([x]) / copy, read=gigabytes([x]) / read)
    print("ceilings: copy {copy:.2f} TB/s (read + written), read {read:.2f} TB/s\n".format(**report.data["ceilings"]))


def weights(model):
    """What a step reads: every parameter, but not an embedding table that is not lm_head too."""
    return [w for name, w in model.parameters.items() if w is model.lm_head or name != "model.embed_tokens.weight"]


def time_step(report, model, stepper, rows):
    """Times of the step that has this plan, GB that it must read, and its share of the ceilings."""
    slow = any(row[3] for row in rows)
    if not stepper([0] * len(rows), rows).isfinite().all():
        raise ArithmeticError("the step's logits are not finite")
    times = spread(timed(stepper.graphs[slow][0].replay if stepper.capture else partial(stepper.compute, slow),
                         report.scale.repeats))
    keys = getattr(stepper.memory, "full", stepper.memory).keys             # [L, B, G, C, D]
    token = 2 * gigabytes([keys[:, 0, :, 0]])
    size = gigabytes(weights(model)) + token * sum(compact + end - start for compact, start, end, _ in rows)
    return dict(times, gb=round(size, 3), **{f"{kind}_share": round(size / times["ms"] / ceiling, 3)
                                             for kind, ceiling in report.data["ceilings"].items()})


def time_decode(model, memory, stepper, config, tokens, stretch=1):
    """Wall clock per token of the decode loop, after its bootstrap, over stretches that hold one slow step each."""
    logits = torch.zeros(memory.batch, model.config.vocab_size, device=model.device)
    marks = [time.perf_counter() for _ in decode(model, memory, logits, config, tokens + 1, stepper=stepper)][::stretch]
    return spread([1000 * (b - a) / stretch for a, b in zip(marks, marks[1:])])


@torch.inference_mode()
def measure_steps(report, name, context, batch):
    """All figures of one model, context and batch size, over one cache of random keys and values."""
    scale, model, row = report.scale, report.model(name), title_of(name, context, batch)
    n, cells, on_gpu = scale.contexts[context], report.cells(name, context, batch), model.device.type == "cuda"
    full = FullMemory(model, batch, n + scale.tokens + 64, queries=16)
    for layer, norms in enumerate(full.key_norms):
        for x in (full.keys, full.values, full.ring):
            x[layer].normal_()                                              # as after k-norm: RMS 1
        torch.linalg.vector_norm(full.keys[layer], dim=-1, dtype=norms.dtype, out=norms)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def full_kv():
        full.rewind([n - 1] * batch)                                        # capturing runs the step of position n - 1
        stepper = Stepper(model, full)
        cells["full"] = time_step(report, model, stepper, [(0, 0, n, 0)] * batch)
        full.rewind([n] * batch)
        cells["decode full"] = time_decode(model, full, stepper, SFIConfig(policy="always"), scale.tokens // 4)

    def slow_fast(title, preset="paper", intervals=(), **options):
        config = SFIConfig.preset(preset, **scale.knobs)
        full.rewind([n - 1] * batch)
        memory = SlowFastMemory(model, full, config, **options)
        stepper = Stepper(model, memory)
        full.rewind([n] * batch)
        rows = memory.plan([True] * batch)
        cells[title] = slow = time_step(report, model, stepper, rows)
        if not intervals:
            return
        memory.finish(rows)
        full.rewind([n + 32] * batch)
        cells["fast"] = fast = time_step(report, model, stepper, memory.plan([False] * batch))
        for interval in intervals:
            full.rewind([n] * batch)
            regular = replace(config, policy="interval", refresh_interval=interval)
            cells[f"decode 1 in {interval}"] = time_decode(model, memory, stepper, regular, scale.tokens, interval)
            cells[f"computed 1 in {interval}"] = dict(
                ms=round(((interval - 1) * fast["ms"] + slow["ms"]) / interval, 4))
        if on_gpu:
            parts = dict(weights=[*weights(model), model.cos, model.sin],
                         caches=[full.keys, full.values, full.key_norms, full.ring],
                         sfi=[t for t in vars(memory).values() if isinstance(t, torch.Tensor)])
            parts = {part: round(gigabytes(tensors), 2) for part, tensors in parts.items()}
            peak = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            report.data["memory"][row] = dict(parts, scratch=round(peak - sum(parts.values()), 2), peak=peak)

    report.attempt(f"{row} full", full_kv)
    for title, options in {"slow": dict(intervals=(32, 64)), "slow, robust": dict(preset="robust"),
                           "slow, no overlap": dict(overlap=False), "slow, per layer": dict(group=1),
                           "slow, per layer, no overlap": dict(overlap=False, group=1)}.items():
        report.attempt(f"{row} {title}", partial(slow_fast, title, **options))
    for title, c in cells.items():
        quartiles = f" [{c['low']:.3f}, {c['high']:.3f}]" if "low" in c else ""
        print(f"{row:17}{title:28}{c['ms']:9.3f} ms{quartiles}" + (
            f" {c['gb']:8.2f} GB {100 * c['copy_share']:4.0f} % of copy {100 * c['read_share']:4.0f} % of read"
            if "gb" in c else " per token"))
    print(f"{row:17}GB of memory: {report.data['memory'].get(row)}\n", flush=True)


@torch.inference_mode()
def measure_prefill(report, name, context):
    """One real prefill of random ids, in chunks. A batch is prefilled row after row, so B times as long."""
    model, n = report.model(name), report.scale.contexts[context]
    full, c = FullMemory(model, 1, n), model.config
    ids = torch.randint(c.vocab_size, (n,)).tolist()
    prefill(model, full, [ids[:4096]]).sum().item()                         # warm up
    begin = time.perf_counter()
    prefill(model, full, [ids]).sum().item()
    seconds = time.perf_counter() - begin
    operations = 2 * n * sum(w.numel() for w in weights(model) if w is not model.lm_head)
    operations += 2 * n * n * c.num_hidden_layers * c.num_attention_heads * c.head_dim      # causal: half of the square
    rate = round(operations / seconds / 1e12, 1)
    report.data["prefill"][f"{name} {context}"] = dict(seconds=round(seconds, 3), tflops=rate)
    print(f"prefill {name} {context}: {seconds:.2f} s, {n / seconds:,.0f} tokens/s, {rate} TFLOP/s", flush=True)


@torch.inference_mode()
def measure_attention(report):
    """The attention kernel alone, by the share of N tokens that the compact buffer holds, against dense attention.

    The cache's segment is the step's own token. So that small buffers do not stay in the L2 cache, several take turns.
    """
    scale = report.scale
    (B, H, G, D, N), place = scale.attention, dict(device=scale.device, dtype=scale.dtype)
    ops = kernels.TRITON if scale.device == "cuda" else kernels.TORCH
    q, k, v = (torch.randn(B, heads, D, **place) for heads in (H, G, G))
    full = torch.randn(2, 2, B, G, N, D, **place)                           # [turn, keys and values, ...]
    norms = torch.empty(B, G, N, device=scale.device)

    def attention_us(compact, start):
        plan = torch.tensor([(compact, start, N, 0)] * B, dtype=torch.int32, device=scale.device)
        turns = max(2, math.ceil(N / max(compact, N // 64) / 4))            # a quarter of the dense bytes, at least
        buffers = torch.randn(turns, 2, B, G, compact, D, **place) if compact else [(None, None)] * 2

        def run():
            for turn in range(len(buffers)):
                ops.attend(q, k, v, *full[turn % 2], *buffers[turn], plan, D ** -0.5, norms)

        run()                                                               # compiles
        replay = run
        if scale.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        return 1000 * median(timed(replay, scale.repeats)) / len(buffers)

    dense = report.data["attention"]["dense"] = attention_us(0, 0)
    print(f"\nattention alone, B={B}, {H} query and {G} KV heads, D={D}, KV {N}: dense {dense:.1f} us\n"
          f"{'% kept':>8}{'us':>9}{'speedup':>9}{'paper':>8}")
    for share, paper in PAPER.items():
        us = report.data["attention"][share] = attention_us(max(1, round(N * share / 100)), N - 1)
        print(f"{share:8}{us:9.1f}{dense / us:8.2f}x{paper:7.2f}x")
    print(flush=True)


@torch.no_grad()
def measure_hf(report, name, context, kinds):
    """Hugging Face transformers, random weights, batch 1, SDPA, a cache full of random tokens: wall clock per token."""
    from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, StaticCache
    report.held.clear()
    n, place = report.scale.contexts[context], dict(device=report.scale.device, dtype=report.scale.dtype)
    config = Qwen3Config(**{key: value for key, value in report.scale.models[name].items() if key != "model_type"})
    with torch.device(report.scale.device):
        hf = AutoModelForCausalLM.from_config(config, dtype=report.scale.dtype, attn_implementation="sdpa").eval()

    def measure(kind):
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=n + 64)
        for layer in range(config.num_hidden_layers):
            cache.update(*torch.randn(2, 1, config.num_key_value_heads, n, config.head_dim, **place), layer)
        step = torch.compile(hf.forward, mode="reduce-overhead") if kind == "static, compiled" else hf.forward
        token = torch.zeros(1, 1, dtype=torch.int64, device=report.scale.device)
        marks = []
        for _ in range(16):
            token = step(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            token.item()                                                    # a decode loop has to look at it
            marks.append(time.perf_counter())
        times = spread([1000 * (b - a) for a, b in zip(marks[5:], marks[6:])])  # the first six warm up
        report.cells(name, context, 1)[f"HF {kind}"] = times
        print(f"{title_of(name, context, 1):17}{f'HF {kind}':28}{times['ms']:9.3f} ms [{times['low']:.3f}, "
              f"{times['high']:.3f}] per token", flush=True)

    for kind in kinds:
        report.attempt(f"HF {name} {kind}", partial(measure, kind))


def measure_text(report, folder, file):
    """A real checkpoint on a real text with the sentence trigger, as `python sfi.py --prompt FILE` runs it."""
    model = qwen3.load(folder, report.scale.device)
    ids = model.tokenizer.encode(file.read_text(encoding="utf-8"))
    config = SFIConfig.preset(PRESET, selected=round(RETAIN * len(ids)))
    for mode in ("full", "sfi"):
        steps = generate(model, ids, config, mode, report.scale.written, stop_ids=()).steps
        slow = sum(s.kind == "slow" for s in steps[1:])
        result = report.data["text"][mode] = dict(speed(steps), slow_steps=slow)
        print(f"text of {len(ids)} tokens, {mode}: {result['tokens_per_second']:.0f} tokens/s, {slow} slow steps of "
              f"{len(steps) - 1}", flush=True)


def compile_ahead(rows, limit=150):
    """Compile every variant of every kernel that the rows need, each in a process of its own, on a model of one layer.

    One core would take minutes for it. The kernels reach this process through Triton's cache on the disk.
    """
    begin = time.monotonic()
    workers = [subprocess.Popen([sys.executable, __file__, "--layers", "1", "--only", row, "--out", os.devnull],
                                stdout=subprocess.DEVNULL) for row in rows]
    for worker in workers:
        try:
            worker.wait(max(0, limit - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)


def print_summary(report):
    """One line per configuration, and where SFI begins to pay."""
    columns = {"slow/full": ("slow", "full"), "no overlap": ("slow, no overlap", "full"),
               "robust": ("slow, robust", "full"), "1 in 32": ("decode full", "decode 1 in 32"),
               "computed": ("full", "computed 1 in 32"), "1 in 64": ("decode full", "decode 1 in 64"),
               "computed ": ("full", "computed 1 in 64")}
    print(f"\n{'':17}" + "".join(f"{title:>12}" for title in ("full ms", "fast ms", "slow ms", *columns)))
    for name in report.scale.models:
        for batch in report.scale.batches[name]:
            saved = []
            for context, n in report.scale.contexts.items():
                row = name, context, batch
                cells = report.cells(*row)
                values = [cells[kind]["ms"] if kind in cells else None for kind in ("full", "fast", "slow")]
                values += [report.ratio(*pair, *row) for pair in columns.values()]
                print(f"{title_of(*row):17}" + "".join(f"{'-' if v is None else f'{v:.3f}':>12}" for v in values))
                if "computed 1 in 32" in cells and "full" in cells:
                    saved.append((n, cells["full"]["ms"] - cells["computed 1 in 32"]["ms"]))
            if len(saved) > 1:
                (a, x), (b, y) = saved[:2]                                  # what is saved grows linearly with N
                even = f"at about {max(0, a - x * (b - a) / (y - x)):,.0f} tokens" if y > x else "nowhere"
                print(f"{name} B={batch}: one slow step in 32 breaks even {even}, going by the two shortest contexts")


def print_targets(report):
    print(f"\n{'':46}{'required':>10}{'aim':>8}{'measured':>10}")
    for over, under, name, context, required, aims in TARGETS:
        for batch, least, aim in zip(report.scale.batches[name], required, aims):
            if least is None:
                continue
            value = report.ratio(over, under, name, context, batch)
            sign = -1 if over.startswith("slow") else 1
            mark = ("not run" if value is None else "MISSED" if sign * value < sign * least else
                    "ok, aim missed" if sign * value < sign * aim else "ok, aim reached")
            print(f"{over + ' / ' + under:32}{title_of(name, context, batch):14}{least:10.2f}{aim:8.2f}"
                  f"{'-' if value is None else f'{value:.2f}':>10}  {mark}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--model", metavar="DIR", help="measure this checkpoint instead of random Qwen3 4B and 0.6B shapes")
    p.add_argument("--minutes", type=float, default=9, help="leave out what does not fit (default: %(default)s)")
    p.add_argument("--only", default="", metavar="WORD", help="only the jobs whose title has this word")
    p.add_argument("--out", type=Path, default=Path("speed.json"), help="written after each job (default: %(default)s)")
    p.add_argument("--layers", type=int, help=argparse.SUPPRESS)           # compile_ahead's workers
    p.add_argument("--smoke", action="store_true", help="toy shapes on the CPU, to try the program itself")
    arguments = p.parse_args()
    scale = SMOKE if arguments.smoke else GPU
    if scale.device == "cuda" and not torch.cuda.is_available():
        sys.exit("speed: no CUDA device here (--smoke needs none)")
    if arguments.layers:
        scale.buffer, scale.repeats, scale.tokens = 2**20, 2, 128
        scale.models = {name: dict(m, num_hidden_layers=arguments.layers) for name, m in scale.models.items()}
    report = Report(scale, arguments.out, arguments.minutes)
    card = torch.cuda.get_device_name() if scale.device == "cuda" else "CPU with toy shapes: no figure counts"
    report.data |= dict(card=card, torch=torch.__version__, triton=triton.__version__, date=time.strftime("%Y-%m-%d"))
    print("{card}, torch {torch}, triton {triton}, {date}".format(**report.data))
    if arguments.model:
        loaded, name = qwen3.load(arguments.model, scale.device, scale.dtype), Path(arguments.model).resolve().name
        room = loaded.config.max_position_embeddings - scale.tokens - 64
        contexts = {context: n for context, n in scale.contexts.items() if n <= room} or {f"{room}": room}
        report.held[name] = loaded
        scale.models, scale.batches, scale.contexts = {name: None}, {name: (1, 4, 8)}, contexts

    # Title, the seconds it may need, function, arguments; the most important first.
    steps = {context: [(title_of(name, context, batch), 20, measure_steps, name, context, batch)
                       for name in scale.models for batch in scale.batches[name]] for context in scale.contexts}
    if scale.device == "cuda" and not arguments.layers and not arguments.model:
        compile_ahead([row for jobs in steps.values() for row, *_ in jobs if arguments.only in row])
    jobs = [*steps.pop("128K", ())]
    if not arguments.model:
        jobs += [("HF dynamic", 30, measure_hf, "4B", "128K", ("dynamic",))]
    jobs += [*steps.pop("32K", ()), ("attention alone", 15, measure_attention),
             ("text", 25, measure_text, ROOT / "tiny", ROOT / "examples" / "8k.txt")]
    jobs += [job for rest in steps.values() for job in rest]
    jobs += [(f"prefill {name} {context}", 5 + n // 6000, measure_prefill, name, context)
             for context, n in scale.contexts.items() for name in scale.models]
    if not arguments.model:
        jobs += [("HF dynamic, small", 20, measure_hf, "0.6B", "128K", ("dynamic",)),
                 ("HF static, compiled", 150, measure_hf, "4B", "128K", ("static", "static, compiled"))]
    report.job("ceilings", 0, measure_ceilings)
    for title, *job in jobs:
        if arguments.only in title:
            report.job(title, *job)
    print_summary(report)
    if not arguments.model:
        print_targets(report)
    print(report.line())


if __name__ == "__main__":
    main()
