"""Traces: every intermediate of a run of Slow-Fast Inference in one safetensors file, for the author of a port.

`record` runs SFI and writes what happened; `Trace` reads such a file, whoever wrote it, for verify.py, which finds its
first wrong number. Both walk a run in the same way: `WatchedModel` and `WatchedMemory` show each intermediate to a
function `see` and go on with what it returns: the recorder what it was shown, the verifier the other program's value.
This file does not know what is right. Paper: the whole method, stage by stage. golden/README.md lists every name.

Symbols as in sfi.py; t tokens of a step (the prompt's T at step 0, else 1), n candidates, R evidence rows.
"""
import hashlib
import json
import os
import platform
import re
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import safetensors
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import kernels
import selector
from model import find_folder, weight_files
from selector import SelectorConfig, at_least_fp32
from sfi import Chunk, Generation, Sampling, SFIConfig, SlowFastMemory, Stepper, decode, read_prompts, sentence_tokens

VERSION = "1"
LISTS = ("prompt", "ids", "reason", "length", "edge")                       # of a sequence
REASONS = ("fast", "prefill", "sentence", "interval", "always", "doubt")    # a step's `reason` is an index into these
INPUTS = ("evidence_logits", "key_norms")                                   # of the Selector
SCORES = ("log_evidence", "log_prior", "lam", "log_fused", "log_nms", "log_exclusive", "log_spread")
TENSORS = ("q", "k", "v", "attention", "hidden", "logits")
DEPTHS = {"steps": (), "selection": (*INPUTS, *SCORES, "positions"),
          "tensors": (*TENSORS, *INPUTS, *SCORES, "positions")}


def key(b, step, layer, name):
    """The name in the file of one intermediate; layer None for what a step has once."""
    return f"sequence.{b}.step.{step}" + ("" if layer is None else f".layer.{layer}") + f".{name}"


class WatchedModel:
    """A model that shows the q, k, v and attention output [t, heads, D] and the hidden state [t, hidden] of each layer.

    see(b, layer, name, value, **what_it_came_from) -> the value to go on with, of the same shape.
    """

    def __init__(self, model, see):
        self.model, self.see = model, see

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, ids, step, memory):
        rows = [step.row] if isinstance(step, Chunk) else range(memory.batch)

        def show(layer, name, values, **sources):
            for i, b in enumerate(rows):
                values[i] = self.see(b, layer, name, values[i], positions=step.positions[i], memory=memory,
                                     **{source: value[i] for source, value in sources.items()})

        def attend(layer, q, k, v, step):
            for name, value in (("q", q), ("k", k), ("v", v)):
                show(layer, name, value)
            out = memory.attend(layer, q, k, v, step)
            show(layer, "attention", out, q=q)
            return out

        return self.model.forward(ids, step, SimpleNamespace(attend=attend),
                                  observe=lambda layer, hidden: show(layer, "hidden", hidden))


class WatchedMemory(SlowFastMemory):
    """A SlowFastMemory that shows each selection's stages, computed once more, to `see`; one layer at a time."""
    every_row = True

    def __init__(self, model, full, config, see):
        super().__init__(model, full, config, overlap=False, group=1)
        self.see = see

    def edge(self, b, n):
        """Where the candidates of a slow step over n tokens end. SPEC section 2."""
        return max(min(self.config.sink, n), n - self.config.recent)

    def select(self, layers, rows, logits, lse, plan):
        super().select(layers, rows, logits, lse, plan)
        for i, b in enumerate(range(self.batch)[rows]):
            _, _, n, slow = plan[i].tolist()
            if slow and self.edge(b, n) > self.config.sink:     # there are candidates
                self.show(layers.start, b, n, logits[0, i, ..., :n])

    def show(self, layer, b, n, logits):
        """The stages of SPEC section 5, each from what `see` returned for the stages before it."""
        def see(name, value, **sources):
            return self.see(b, layer, name, value, **sources)

        c = self.config.selector
        lo, hi = min(self.config.sink, n), self.edge(b, n)
        count = min(self.positions.shape[-1], hi - lo)
        z = see("evidence_logits", logits)                                                      # [G, R, N]
        norms = see("key_norms", self.full.key_norms[layer, b, :, :n])                          # [G, N]
        log_f = see("log_evidence", selector.evidence(z, lo, hi, c.alpha), logits=z, lo=lo)     # [G, n], as all below
        log_r = see("log_prior", selector.prior(norms, lo, hi, c))
        rows = selector.seeing(z, lo, hi).sum(-1)
        lam = see("lam", selector.mixing_weight(log_f, log_r, rows, c), log_f=log_f, log_r=log_r, rows=rows)    # [G]
        log_s = see("log_fused", selector.fuse(log_f, log_r, lam), log_f=log_f, log_r=log_r, lam=lam)
        scores = see("log_nms", selector.soft_nms(log_s, c.nms_window, c.nms_alpha), scores=log_s)
        scores = see("log_exclusive", selector.exclude(scores, c.exclusivity_alpha, c.exclusivity_temperature, c.eps),
                     scores=scores)
        if c.spread:
            scores = see("log_spread", selector.spread(scores, c.spread), scores=scores)
        published = self.positions[layer, b, :, :count]
        positions = see("positions", published, scores=scores, lo=lo)
        if positions is not published:
            self.publish_again(layer, b, lo, positions)

    def publish_again(self, layer, b, lo, positions):
        """Put other positions [G, count] in the place of those just published, and into the compact buffer."""
        self.positions[layer, b, :, : positions.shape[-1]] = positions
        for full, compact in ((self.full.keys, self.compact_keys), (self.full.values, self.compact_values)):
            kernels.rebuild(full[layer, b], compact[layer, b], lo, positions)


class KernelMemory(WatchedMemory):
    """A WatchedMemory that shows what the Triton Selector computed; it never writes log r and the scores after NMS."""

    def show(self, layer, b, n, logits):
        c, lo, hi = self.config.selector, min(self.config.sink, n), self.edge(b, n)
        norms = self.full.key_norms[layer, b, :, :n]
        plan = torch.tensor([(0, 0, n, 1)], dtype=torch.int32, device=logits.device)
        lse = at_least_fp32(logits[..., lo:hi]).logsumexp(-1)
        log_f, lam, *scores = (x[0, 0] for x in kernels.scores_triton(
            logits[None, None], lse[None, None], norms[None, None], plan, self.config.sink, self.config.recent, c)[:5])
        values = [logits, norms, log_f[:, lo:hi].log_softmax(-1), lam, *(x[:, lo:hi] for x in scores),
                  self.positions[layer, b, :, : hi - lo]]
        names = *INPUTS, "log_evidence", "lam", "log_fused", "log_exclusive", "log_spread", "positions"
        for name, value in zip(names, values):
            if name != "log_spread" or c.spread:
                self.see(b, layer, name, value)


class Recorder:
    """A `see` that keeps what it is shown, within the wanted names, layers and steps."""

    def __init__(self, names, layers, steps):
        self.names, self.layers, self.steps = names, layers, steps
        self.step, self.tensors = 0, {}

    def __call__(self, b, layer, name, value, **sources):
        if name in self.names and self.step in self.steps and (layer is None or layer in self.layers):
            self.tensors[b, self.step, layer, name] = value.detach().to("cpu", copy=True).contiguous()
        return value


def record(path, model, checkpoint, prompts, config, max_new_tokens, depth="tensors", layers=None, steps=None,
           sampling=Sampling(), sentences=None, stop_ids=None, preset=None):
    """Run SFI on a batch (a list of id lists) and write its trace to `path` -> a Generation per prompt.

    checkpoint: the folder or hub id the model was loaded from; depth "steps", "selection" or "tensors"; layers and
    steps are ranges, all by default; sentences and stop_ids default to the model's; preset is only written down.
    The file appears whole or not at all. Raises ValueError as generate, and for a folder that is not there.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder")
    if depth not in DEPTHS:
        raise ValueError(f"depth must be one of {', '.join(DEPTHS)}, not {depth!r}")
    layers = within("layers", layers, model.config.num_hidden_layers)
    see = Recorder(DEPTHS[depth], layers, within("steps", steps, max_new_tokens))
    sentences = sentence_tokens(model) if sentences is None else sentences
    watched = WatchedModel(model, see)
    longest = max(map(len, prompts), default=None)
    full, logits, seconds = read_prompts(watched, prompts, config, max_new_tokens, chunk=longest)
    memory = (KernelMemory if model.ops.publish is kernels.publish_triton else WatchedMemory)(model, full, config, see)
    results = [Generation([], [], seconds) for _ in prompts]
    edges = [[] for _ in prompts]
    for token in decode(watched, memory, logits, config, max_new_tokens, sentences,
                        model.stop_ids if stop_ids is None else stop_ids, sampling,
                        stepper=Stepper(watched, memory, capture=False)):
        for b, (id, step) in enumerate(zip(token.ids, token.records)):
            if id is not None:
                see(b, None, "logits", token.logits[b])
                results[b].ids.append(id)
                results[b].steps.append(step)
                edges[b].append(memory.edges[b])
        see.step = token.step + 1
    lists = {"ends": sorted(sentences[0]), "blank": sorted(sentences[1])}
    for b, (prompt, result) in enumerate(zip(prompts, results)):
        lists |= {f"sequence.{b}.prompt": prompt, f"sequence.{b}.ids": result.ids, f"sequence.{b}.edge": edges[b],
                  f"sequence.{b}.length": [step.length for step in result.steps],
                  f"sequence.{b}.reason": [REASONS.index(step.reason or "fast") for step in result.steps]}
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()}
    # A sequence that has ended keeps its place in the batch, but what is computed there means nothing.
    tensors |= {key(*place): value for place, value in see.tensors.items() if place[1] < len(results[place[0]].ids)}
    save(path, tensors, metadata(model, checkpoint, config, sampling, preset))
    return results


def within(name, wanted, count):
    """The range `wanted` of `count` layers or steps, all if it is None. ValueError if it is empty or beyond them."""
    if wanted is None:
        return range(count)
    if not 0 <= wanted.start < wanted.stop <= count:
        raise ValueError(f"{name} {wanted.start}:{wanted.stop} must lie within 0:{count}")
    return wanted


def metadata(model, checkpoint, config, sampling, preset):
    """What a trace says of the run beside its tensors: strings, most of them JSON."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "safetensors": safetensors.__version__,
                "triton": getattr(kernels.triton, "__version__", None), "device": str(model.device)}
    return {"format": VERSION, "model": fingerprint(checkpoint), "dtype": str(model.dtype).removeprefix("torch."),
            "config": json.dumps(asdict(config)), "preset": preset or "", "sampling": json.dumps(asdict(sampling)),
            "model_config": json.dumps(asdict(model.config)), "versions": json.dumps(versions)}


def fingerprint(checkpoint):
    """sha256 of a checkpoint, as `cat config.json model*.safetensors | sha256sum` in its folder prints it."""
    folder = find_folder(checkpoint)
    digest = hashlib.sha256()
    for path in (folder / "config.json", *weight_files(folder)):
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def whole_file(path):
    """A path to write to, moved to `path` when all is written: a file of that name is always a whole one.

    A link is followed and an old file's mode kept. OSError for what exists and is no regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    unfinished = path.with_name(f".{os.getpid()}{path.suffix}")             # the suffix tells matplotlib the format
    try:
        unfinished.touch()                                                  # with the umask's mode
        if path.exists():
            unfinished.chmod(path.stat().st_mode & 0o7777)
        mode = unfinished.stat().st_mode & 0o7777
        yield unfinished
        unfinished.chmod(mode)                                              # safetensors makes a file of its own
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save(path, tensors, metadata):
    try:
        with whole_file(path) as unfinished:
            save_file(tensors, unfinished, metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None


class Trace:
    """A trace file, opened to be compared with a model: its metadata, and its tensors as they are asked for.

    Raises ValueError or FileNotFoundError in one line for a file that is not whole, of another format or of another
    model, and for a name or tensor that is missing, unknown, of a wrong shape or not a number.
    """

    def __init__(self, path, model, checkpoint):
        self.path = path
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file")
        try:
            self.file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        meta = self.file.metadata() or {}
        for name in ("format", "model", "dtype", "config"):
            if name not in meta:
                raise self.error(f"metadata lacks {name!r}")
        if meta["format"] != VERSION:
            raise self.error(f"format {meta['format']!r}, but this program reads {VERSION!r}")
        theirs, ours = meta["model"], fingerprint(checkpoint)
        if theirs != ours:
            raise self.error(f"written with another model: fingerprint {theirs[:16]}, "
                             f"that of {checkpoint} is {ours[:16]}")
        self.dtype = meta["dtype"]
        knobs = self.parse(meta["config"])
        self.config = self.build(SFIConfig, {**knobs, "selector": self.build(SelectorConfig, knobs.get("selector"))})
        self.sampling = self.build(Sampling, self.parse(meta["sampling"])) if "sampling" in meta else Sampling()
        self.names = frozenset(self.file.keys())
        self.unread = set(self.names)
        self.batch = self.check_names(model.config.num_hidden_layers)
        self.prompts, self.ids = (
            [self.integers(f"sequence.{b}.{name}") for b in range(self.batch)] for name in ("prompt", "ids"))
        for b, ids in enumerate(self.ids):
            wrong = [id for id in ids if not 0 <= id < model.config.vocab_size]
            if wrong or not ids:
                raise self.error(f"sequence.{b}.ids " + (f"holds token id {wrong[0]}, outside the vocabulary of "
                                                         f"{model.config.vocab_size}" if wrong else "is empty"))

    def error(self, message):
        return ValueError(f"{self.path}: {message}")

    def parse(self, text):
        """The JSON object in a string of the metadata."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise self.error(f"metadata holds {text[:40]!r}, which is no JSON object")
        return values

    def build(self, cls, values):
        """A configuration class from an object of the metadata, which must give each of its knobs."""
        if not isinstance(values, dict):
            raise self.error(f"metadata gives no object for {cls.__name__}")
        for name in sorted({f.name for f in fields(cls)} ^ values.keys()):
            raise self.error(f"metadata {'has an unknown' if name in values else 'lacks the'} knob {name!r}")
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise self.error(str(error)) from None

    def check_names(self, layers):
        """Refuse a name that is not in golden/README.md -> the number of sequences."""
        per_layer = "|".join(name for name in DEPTHS["tensors"] if name != "logits")
        pattern = re.compile(rf"ends|blank|sequence\.(\d+)\.({'|'.join(LISTS)}|step\.\d+\.logits|"
                             rf"step\.\d+\.layer\.(\d+)\.({per_layer}))")
        sequences = {0}
        for name in sorted(self.names):
            match = pattern.fullmatch(name)
            if not match:
                raise self.error(f"{name} is not a name of this format")
            if match[3] and int(match[3]) >= layers:
                raise self.error(f"{name}: the model has {layers} layers")
            sequences.add(int(match[1] or 0))
        for b in range(max(sequences) + 1):
            for name in ("prompt", "ids"):
                if f"sequence.{b}.{name}" not in self:
                    raise self.error(f"sequence.{b}.{name} is missing")
        return len(sequences)

    def __contains__(self, name):
        return name in self.names

    def get(self, name):
        self.unread.discard(name)
        value = self.file.get_tensor(name)
        if value.dtype == torch.bool or value.is_complex() or value.is_floating_point() and value.itemsize == 1:
            raise self.error(f"{name} has type {value.dtype}, which is no type for a trace")
        return value

    def integers(self, name, count=None):
        """A list of whole numbers, `count` of them if that is given; None if the trace lacks it."""
        if name not in self:
            return None
        values = self.get(name)
        if values.dim() != 1 or values.is_floating_point() or count not in (None, len(values)):
            raise self.error(f"{name} has shape {list(values.shape)} and type {values.dtype}, but should have "
                             f"{'one dimension' if count is None else f'shape [{count}]'} and an integer type")
        return values.tolist()

    def tensor(self, name, like):
        """Their tensor, on our device; None if the trace lacks it. Only logarithms and masked logits may be -inf."""
        if name not in self:
            return None
        value = self.get(name)
        if value.shape != like.shape:
            raise self.error(f"{name} has shape {list(value.shape)}, but should have {list(like.shape)}")
        if value.is_floating_point() != like.is_floating_point():
            raise self.error(f"{name} has type {value.dtype}, but should have one like {like.dtype}")
        value = value if value.is_floating_point() else value.long()        # what can be an index
        bad = value.isnan() | value.isposinf()
        if not name.endswith((*SCORES, "evidence_logits")):
            bad |= value.isneginf()
        if bad.any():
            index = bad.nonzero()[0].tolist()
            raise self.error(f"{name} is {value[tuple(index)].item()} at {index}")
        return value.to(like.device)
