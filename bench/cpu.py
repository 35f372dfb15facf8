"""Speed and memory on a CPU: prefill, full KV and SFI, slow and fast steps apart, and a step's cost outside attention.

Each length is measured in a process of its own, so that its peak memory is its own. Tokens are forced, so that both
memories do the same work. Nothing here is a test: times are the machine's. SPEC sections 2 and 3.

    python bench/cpu.py                 the shipped checkpoint at 1K, 4K and 8K tokens: a table and one line of JSON
"""
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import model as qwen3
import text
from cli import Parser
from sfi import SFIConfig, SlowFastMemory, Stepper, decode, read_prompts, sentence_tokens

LENGTHS = [1024, 4096, 8192]


class Clock:
    """A memory whose attention is timed: `seconds` since it was last set to 0."""

    def __init__(self, memory):
        self.memory, self.seconds = memory, 0.0

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def attend(self, *step):
        begin = time.perf_counter()
        out = self.memory.attend(*step)
        self.seconds += time.perf_counter() - begin
        return out


def timed(model, memory, logits, config, ids):
    """Decode the given ids -> {kind of step: (ms of a step, ms of it outside attention)}, medians; and tokens/s."""
    clock = Clock(memory)
    steps, outside = [], []
    for token in decode(model, memory, logits, config, len(ids), sentence_tokens(model), (), forced=[ids],
                        stepper=Stepper(model, clock, capture=False)):
        steps.append(token.records[0])
        outside.append(token.records[0].seconds - clock.seconds)
        clock.seconds = 0.0
    pairs = list(zip(steps, outside))[3:]                                   # the first steps warm caches
    kinds = {kind: tuple(1000 * median(x) for x in zip(*[(s.seconds, o) for s, o in pairs if s.kind == kind]))
             for kind in {s.kind for s, _ in pairs}}
    return kinds, len(pairs) / sum(s.seconds for s, _ in pairs)


def read(tokenizer, length, new):
    """A document's ids: `length` for the prompt, `new` to feed after them."""
    # A document is only about as long as it is asked to be.
    ids = tokenizer.encode(text.make_document(500_000, length + new + 64, "scattered", questions=8).text)
    if len(ids) < length + new:
        raise ValueError(f"--lengths: no document has {length} tokens and {new} to feed after them")
    return ids[:length], ids[length : length + new]


def measure(folder, length, new, threads, preset, retain):
    """All numbers at one prompt length, as a dict."""
    torch.set_num_threads(threads)
    model = qwen3.load(folder, dtype=torch.float32)
    if model.tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json")
    prompt, forced = read(model.tokenizer, length, new)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = SFIConfig.preset(preset, selected=round(retain * length))
    full, logits, seconds = read_prompts(model, [prompt], config, len(forced))
    row = {"tokens": length, "prefill_seconds": seconds}
    with torch.inference_mode():
        runs = {}
        for name in ("full", "sfi"):
            full.rewind([length])
            memory = full if name == "full" else SlowFastMemory(model, full, config)
            runs[name], row[f"{name}_tokens_per_second"] = timed(
                model, memory, logits, replace(config, policy="always") if name == "full" else config, forced)
    for label, (step, outside) in (("full", runs["full"]["slow"]), ("sfi_slow", runs["sfi"]["slow"]),
                                   ("sfi_fast", runs["sfi"]["fast"])):
        row |= {f"{label}_ms": step, f"{label}_outside_attention_ms": outside}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return row | {"peak_mib": peak / 1024, "peak_above_model_mib": (peak - before) / 1024}


def main(argv=None):
    p = Parser(description="Speed and memory of full KV and SFI on a CPU, at batch 1 in fp32.")
    p.add_argument("--model", default="tiny", help="folder (default: the shipped checkpoint)")
    p.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    p.add_argument("--new-tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--preset", default="robust")
    p.add_argument("--retain", type=float, default=0.12)
    p.add_argument("--output", default=str(ROOT / "bench" / "results" / "cpu.json"))
    a = p.parse_args(argv)
    if min(*a.lengths, a.new_tokens - 63, a.threads) < 1 or not 0 <= a.retain <= 1:
        raise ValueError("--lengths and --threads must be at least 1, --new-tokens at least 64 (a slow step is due by "
                         "then), --retain from 0 to 1")
    if not a.output.endswith(".json") or not Path(a.output).parent.is_dir():
        raise ValueError(f"--output must be FILE.json, its table FILE.md, in a folder that is there, not {a.output!r}")
    folder = str(ROOT / "tiny") if a.model == "tiny" else a.model
    rows = []
    for length in a.lengths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (folder, length, a.new_tokens, a.threads, a.preset, a.retain)))
    lines = ["| tokens | " + " | ".join(f"{row['tokens']:,}" for row in rows) + " |", "|---" * (1 + len(rows)) + "|"]
    for key in list(rows[0])[1:]:
        lines.append(f"| {key.replace('_', ' ')} | " + " | ".join(f"{row[key]:.1f}" for row in rows) + " |")
    Path(a.output).with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    line = json.dumps({"threads": a.threads, "preset": a.preset, "retain": a.retain, "rows": rows})
    Path(a.output).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"cpu: {error}")
