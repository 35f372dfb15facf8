"""Writes every golden trace, greedy and in fp32 on the CPU: python golden/make_traces.py [NAME ...]

The models are the checkpoints under golden/qwen3, tiny and random, and the shipped one. They are told made-up sentence
ends, for they have no tokenizer, and small knobs, so that slow and fast steps alternate within a few tokens.
"""
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import model as qwen3
import trace
from sfi import SFIConfig

TRACES = ROOT / "golden" / "traces"
KNOBS = dict(sink=4, recent=8, selected=8, refresh_interval=7, min_gap=3)
SENTENCES = frozenset(range(0, 512, 9)), frozenset(range(5, 512, 50))


@dataclass(frozen=True)
class Golden:
    """One golden trace: a checkpoint, prompts of these lengths, a preset with knobs on top, and what is kept of it."""
    checkpoint: str
    lengths: tuple = (40,)
    preset: str = "paper"
    knobs: dict = field(default_factory=dict)
    sentences: tuple = SENTENCES
    stop_ids: tuple = ()
    new_tokens: int = 24
    keep: dict = field(default_factory=dict)

    @property
    def folder(self):
        return ROOT / self.checkpoint if self.checkpoint == "tiny" else ROOT / "golden" / "qwen3" / self.checkpoint

    @property
    def config(self):
        return SFIConfig.preset(self.preset, **KNOBS | self.knobs)


GOLDENS = {
    "paper": Golden("dense-tied", knobs=dict(nms_window=4)),
    "paper-quality": Golden("dense-tied", preset="paper-quality", knobs=dict(nms_window=5),
                            keep=dict(depth="selection")),
    "robust": Golden("dense-tied", preset="robust", knobs=dict(spread=2), keep=dict(depth="selection")),
    "one-row": Golden("dense-mha-headdim80", keep=dict(layers=range(2))),
    "moe": Golden("moe-normed", keep=dict(layers=range(2))),
    "moe-mixed": Golden("moe-unnormed-mixed", keep=dict(layers=range(1, 3), steps=range(12))),
    "yarn": Golden("dense-yarn", lengths=(140,), new_tokens=12, keep=dict(layers=range(1))),
    "batch": Golden("dense-untied-sharded", lengths=(2, 33, 17), preset="robust", knobs=dict(spread=2), stop_ids=(331,),
                    keep=dict(layers=range(1))),
    "doubt": Golden("dense-tied", knobs=dict(doubt=0.3, doubt_gap=3), keep=dict(layers=range(1))),
    "no-sentences": Golden("dense-tied", sentences=((), ()), keep=dict(layers=range(1))),
    "all-selected": Golden("dense-tied", knobs=dict(selected=100), keep=dict(layers=range(1))),
    "shipped": Golden("tiny", preset="robust", knobs=dict(recent=64, selected=100, refresh_interval=32, min_gap=8),
                      sentences=None, new_tokens=200, keep=dict(layers=range(4, 5), steps=range(150, 170))),
}


def prompts(golden, model):
    """Ids that any language can make: (7 + i (i + 31) + 101 b) mod 509 + 2 at position i of prompt b; or a text's."""
    if golden.checkpoint == "tiny":
        return [model.tokenizer.encode((ROOT / "examples" / "1k.txt").read_text(encoding="utf-8"))]
    return [[(7 + i * (i + 31) + 101 * b) % 509 + 2 for i in range(length)] for b, length in enumerate(golden.lengths)]


def make(golden, path, dtype=torch.float32, ops=None):
    """Record a golden run to `path` -> a Generation per prompt."""
    model = qwen3.load(golden.folder, dtype=dtype, ops=ops)
    return trace.record(path, model, golden.folder, prompts(golden, model), golden.config, golden.new_tokens,
                        sentences=golden.sentences, stop_ids=golden.stop_ids, preset=golden.preset, **golden.keep)


def available():
    """The names of all golden traces whose checkpoint is here."""
    return [name for name, golden in GOLDENS.items() if any(golden.folder.glob("model*.safetensors"))]


if __name__ == "__main__":
    for name in sys.argv[1:] or available():
        if name not in GOLDENS:
            sys.exit(f"make_traces: give names among {', '.join(GOLDENS)}, or none for all, not {name!r}")
        path = TRACES / f"{name}.safetensors"
        for b, result in enumerate(make(GOLDENS[name], path)):
            slow = {j: step.reason for j, step in enumerate(result.steps) if step.reason}
            print(f"{name}[{b}]: {path.stat().st_size:,} bytes, {len(result.ids)} steps, slow {slow}, ids {result.ids}")
