"""Slow-Fast Inference: the two memories, the trigger that tells slow steps from fast ones, the decode loop.

One decoder (model.py), two memories. The decoder hands q, k and v of a layer to a memory, which stores them and
returns the attention output: `FullMemory` reads every token in every step, `SlowFastMemory` reads sink, selected
and recent tokens in a fast step, and everything in a slow step, whose logits choose the next selection.
This file does not know how scores are made (selector.py) nor how a step's attention is computed (kernels.py); prefill
and the bootstrap selection call torch functions on every device.
Paper: sections on the slow-fast schedule, memory layout and overlap. SPEC sections 2, 3, 4 and 6.

Symbols: B sequences, T prompt tokens, N cached tokens with the step's own, L layers, H query heads, G KV heads,
D head dim, K selected tokens, C capacity. Step 0 is the end of prefill; step j takes the j-th generated token.
"""
import functools
import operator
import os
import signal
import sys
import time
from dataclasses import dataclass, field, fields, replace

if __name__ == "__main__":              # Ctrl-C while libraries load, which may take it for a fault of their own
    ctrl_c = signal.signal(signal.SIGINT, lambda *_: os._exit(print("interrupted", file=sys.stderr) or 130))

import torch

from model import causal_attention
from kernels import evidence_logits
from selector import SelectorConfig, at_least_fp32, check_knobs

POLICIES = ("sentence", "interval", "never", "always")


@dataclass(frozen=True)
class SFIConfig:
    """Every knob of Slow-Fast Inference outside the Selector; the defaults are the paper's throughput runs.

    Counts are tokens, queries or steps. `doubt` is a probability: a fast step whose best next token is less likely
    is done again as a slow one, at least `doubt_gap` steps after the last such (ours; 0 is off).
    Raises ValueError naming the knob. SPEC sections 4, 5 and 8.
    """
    sink: int = 4
    recent: int = 256
    selected: int = 2048
    refresh_interval: int = 64
    min_gap: int = 16
    policy: str = "sentence"
    evidence_queries: int = 1
    bootstrap_queries: int = 16
    doubt: float = 0.0
    doubt_gap: int = 4
    selector: SelectorConfig = field(default_factory=SelectorConfig)

    def __post_init__(self):
        counts = {f.name: (0, 2**62) for f in fields(self) if f.type is int}
        check_knobs(self, counts | dict(doubt=(0, 1), evidence_queries=(1, 2**20), bootstrap_queries=(1, 2**20)))
        if not isinstance(self.selector, SelectorConfig):
            raise ValueError(f"selector must be a SelectorConfig, not {self.selector!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")

    @classmethod
    def preset(cls, name, **knobs):
        """The preset `name` with any knob, of this class or of the Selector, set on top. SPEC section 5."""
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {name!r}")
        knobs = PRESETS[name] | knobs
        inner = {f.name for f in fields(SelectorConfig)} & knobs.keys()
        selector = replace(knobs.pop("selector", SelectorConfig()), **{key: knobs.pop(key) for key in inner})
        unknown = knobs.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown knob: {', '.join(sorted(unknown))}")
        return cls(selector=selector, **knobs)


PRESETS = {
    "paper": {},
    "paper-quality": dict(selected=4096, refresh_interval=32, lambda_cap_single=0.01, lambda_cap_multi=0.01,
                          nms_alpha=0.5, exclusivity_alpha=0.35),
    "robust": dict(evidence_queries=8, alpha=2.0, spread=8),
}
# Chosen on documents that no result is reported on: fewest reads that lost nothing (bench/results/NOTES.md).
PRESETS["robust-doubt"] = PRESETS["robust"] | dict(recent=128, doubt=0.99997, doubt_gap=1)
RETAINS = {"robust-doubt": 0.02}        # a preset's own K, as a fraction of the prompt


class Trigger:
    """Says, for one sequence, which steps are slow and why. SPEC section 4.

    ends, blank: sets of token ids whose text ends a sentence or is only white space.
    """

    def __init__(self, config, ends, blank):
        self.config, self.ends, self.blank = config, ends, blank
        self.armed = False
        self.last_slow = 0              # step 0, the end of prefill, counts as slow
        self.last_doubt = None

    def __call__(self, step, token):
        """The reason why step number `step`, which takes `token` as its input, is slow; None where it is fast."""
        starts_sentence = False
        if token in self.ends:
            self.armed = True
        elif self.armed and token not in self.blank:
            self.armed, starts_sentence = False, True
        since = step - self.last_slow
        policy = self.config.policy
        if policy == "always":
            reason = "always"
        elif policy == "sentence" and starts_sentence and since >= self.config.min_gap:
            reason = "sentence"
        elif policy in ("sentence", "interval") and since >= self.config.refresh_interval:
            reason = "interval"
        else:
            return None
        self.last_slow = step
        return reason

    def doubts(self, step, confidence):
        """Whether fast step `step`, whose likeliest next token has this probability, is to be done again slowly."""
        rested = self.last_doubt is None or step - self.last_doubt >= self.config.doubt_gap
        if confidence >= self.config.doubt or not rested:
            return False
        self.last_slow = self.last_doubt = step
        return True


@dataclass(frozen=True)
class Chunk:
    """Part of one prompt on its way into a memory: row `row`, positions [1, T] int64, which are contiguous."""
    row: int
    start: int
    positions: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One decode step of a batch: positions [B, 1] int64, `plan` [B, 4] as in kernels.py, and if any row is slow."""
    positions: torch.Tensor
    plan: torch.Tensor
    slow: bool


class FullMemory:
    """Keys and values of B sequences, each read whole in every step. Nothing is ever evicted. SPEC section 2.

    keys, values [L, B, G, C, D]; key_norms [L, B, G, C] in at least fp32; ring [L, B, Q, H, D] holds the queries of
    the last Q prompt positions (position p at slot p % Q) for a memory built on this one. C is `capacity` rounded up.
    """
    kinds = (False,)                    # of step, slow or not: it leaves no logits

    def __init__(self, model, batch, capacity, queries=0):
        c = model.config
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, -(-capacity // 64) * 64)
        place = dict(device=model.device, dtype=model.dtype)
        self.keys, self.values = (torch.empty(*shape, c.head_dim, **place) for _ in range(2))
        wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.key_norms = torch.empty(shape, device=model.device, dtype=wide)
        self.ring = torch.empty(shape[0], batch, queries, c.num_attention_heads, c.head_dim, **place)
        self.ops, self.scale, self.batch = model.ops, c.head_dim ** -0.5, batch
        self.lengths = [0] * batch

    def attend(self, layer, q, k, v, step):
        """Store k, v [B, T, G, D] of a layer and attend with q [B, T, H, D] -> [B, T, H, D]."""
        if isinstance(step, Chunk):
            return self.prefill(layer, q, k, v, step)
        out = self.ops.attend(q[:, 0], k[:, 0], v[:, 0], self.keys[layer], self.values[layer], None, None,
                              step.plan, self.scale, self.key_norms[layer])
        return out[:, None]

    def prefill(self, layer, q, k, v, chunk):
        """Dense causal attention of a chunk to all of its sequence so far."""
        end = chunk.start + q.shape[1]
        keys, values, norms = (x[layer, chunk.row] for x in (self.keys, self.values, self.key_norms))
        keys[:, chunk.start : end], values[:, chunk.start : end] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        norms[:, chunk.start : end] = torch.linalg.vector_norm(k[0], dim=-1, dtype=norms.dtype).T
        slots = self.ring.shape[2]
        if slots:
            last = chunk.positions[0, -slots:]
            self.ring[layer, chunk.row, last % slots] = q[0, -slots:]
        return causal_attention(q, keys[None, :, :end], values[None, :, :end], self.scale)

    def start(self):
        """Called once between prefill and the first decode step."""

    def plan(self, slow):
        """The next step's plan, a tuple per row; `slow` [B]: whose trigger fired. A full memory is dense anyway."""
        return [(0, 0, n, 0) for n in self.lengths]

    def finish(self, rows):
        """Called after a step with the plan it ran."""

    def join(self):
        """Called at the end of a step, before its logits are used."""

    def reads(self, layer, b, n):
        """Absolute positions [G, n] that sequence b reads at length n."""
        return torch.arange(n, device=self.keys.device).expand(self.keys.shape[2], n)

    def rewind(self, lengths):
        """Forget all after the first `lengths` [B] tokens: what lies behind them is never read again."""
        self.lengths[:] = lengths


class SlowFastMemory:
    """Sink, selected and recent tokens in a fast step, everything in a slow step. SPEC sections 2, 3 and 6.

    Built on a FullMemory, which holds the prompt and keeps every later token too. compact_keys and compact_values
    [L, B, G, sink + K, D] hold sink and selected tokens; positions [L, B, G, K] int64 their absolute positions, of
    which the first `counts[b]` are meant; firsts, edges [B]: the candidates of the last slow step were [first, edge).
    logits [2, group, B, G, R, C] and lse [2, group, B, G, R]: one group of layers writes while another's are selected
    from, and `done` has the event after which they may be written again; ring [L, B, Q, H, D] as FullMemory's, kept up.
    `group` layers are selected for at once; with `overlap`, on a CUDA device, beside the next layers' work on a stream
    of their own. Raises ValueError if the full memory keeps fewer queries than the configuration asks for.
    """
    kinds = (False, True)               # of step: fast and slow
    every_row = False                   # a trace keeps rows even for queries that no sequence is long enough for

    def __init__(self, model, full, config, overlap=True, group=None):
        c, on_gpu = model.config, full.keys.is_cuda
        layers, batch, heads, capacity, dim = full.keys.shape
        if full.ring.shape[2] < min(capacity, max(config.bootstrap_queries, config.evidence_queries)):
            raise ValueError(f"the full memory keeps {full.ring.shape[2]} queries, too few for bootstrap_queries = "
                             f"{config.bootstrap_queries} or evidence_queries = {config.evidence_queries}")
        config = replace(config, sink=min(config.sink, capacity))
        if not self.every_row:
            config = replace(config, evidence_queries=min(config.evidence_queries, capacity))
        self.full, self.config, self.batch = full, config, batch
        self.rows = config.evidence_queries * c.num_attention_heads // heads        # R
        self.group = group or (self.best_group(batch * heads * self.rows * capacity) if on_gpu else 1)
        self.stream = torch.cuda.Stream() if overlap and on_gpu else None
        self.done = {}
        kept = min(config.selected, capacity)
        self.positions = torch.zeros(layers, batch, heads, kept, dtype=torch.int64, device=full.keys.device)
        self.compact_keys, self.compact_values = (
            full.keys.new_empty(layers, batch, heads, config.sink + kept, dim) for _ in range(2))
        # Two groups' logits: one is selected from while the next is written.
        self.logits = full.key_norms.new_empty(2, self.group, batch, heads, self.rows, capacity,
                                               dtype=self.logit_dtype())
        self.lse = full.key_norms.new_empty(self.logits.shape[:-1])
        self.ring = full.ring.clone()
        self.edges, self.firsts, self.counts = [0] * batch, [0] * batch, [0] * batch

    def best_group(self, count):
        """Layers to select for at once, given the number of logits of one: what makes 2^26, but four to seven.

        Measured on one H200 when it was chosen, slow step with seven and with four: Qwen3-0.6B at batch 1 and 8K 1.49
        and 1.53 ms, at 128K with `robust` 6.76 and 6.54 (bench/results/EXPERIMENTS.md).
        """
        return max(4, min(7, 2**26 // count))

    def logit_dtype(self):
        """Half-precision models keep half-precision logits: the Selector's traffic is what a slow step adds."""
        return self.full.keys.dtype if self.full.keys.is_cuda else self.full.key_norms.dtype

    @property
    def lengths(self):
        return self.full.lengths

    @property
    def selects(self):
        """Whether a slow step selects: under policy `always` nobody would read it."""
        return self.config.policy != "always"

    def attend(self, layer, q, k, v, step):
        """As FullMemory.attend, for decode steps; in a slow step the logits go to the Selector."""
        full, config, evidence = self.full, self.config, ()
        if step.slow and self.selects:
            turn, place = layer // self.group % 2, layer % self.group
            if place == 0 and turn in self.done:
                torch.cuda.current_stream().wait_event(self.done[turn])     # its logits are still being read
            evidence = self.logits[turn, place], self.lse[turn, place], config.sink, config.recent
        out = full.ops.attend(
            q[:, 0], k[:, 0], v[:, 0], full.keys[layer], full.values[layer], self.compact_keys[layer],
            self.compact_values[layer], step.plan, full.scale, full.key_norms[layer],
            self.ring[layer] if config.evidence_queries > 1 else None, config.evidence_queries, *evidence)
        if evidence and (place == self.group - 1 or layer == full.keys.shape[0] - 1):
            self.publish(layer - place, layer + 1, turn, step.plan)
        return out[:, None]

    def publish(self, first, last, turn, plan):
        """Select for layers [first, last) and rebuild their compact buffers, on the side stream if there is one."""
        evidence = self.logits[turn, : last - first], self.lse[turn, : last - first]
        if self.stream is None:
            return self.select(slice(first, last), slice(None), *evidence, plan)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.select(slice(first, last), slice(None), *evidence, plan)
            self.done[turn] = self.stream.record_event()

    def join(self):
        """Make the main stream wait for selections under way; a captured step ends with it."""
        if self.stream is not None and self.done:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.done = {}

    def select(self, layers, rows, logits, lse, plan):
        full, config = self.full, self.config
        full.ops.publish(
            logits, lse, full.key_norms[layers, rows], full.keys[layers, rows], full.values[layers, rows], plan,
            config.sink, config.recent, config.selector, self.positions[layers, rows],
            self.compact_keys[layers, rows], self.compact_values[layers, rows])

    def start(self):
        """Bootstrap: the last prompt queries give the first evidence, sequence by sequence."""
        self.ring.copy_(self.full.ring)
        for b, n in enumerate(self.lengths):
            self.finish_row(b, n)
            own = n - 1 - torch.arange(min(self.config.bootstrap_queries, n), device=self.ring.device)
            plan = torch.tensor([(0, 0, n, 1)], dtype=torch.int32, device=self.ring.device)
            for layer in range(self.ring.shape[0]) if self.selects else ():
                window = self.ring[layer, b, own % self.ring.shape[2]]      # [W, H, D], newest first
                z = evidence_logits(window, self.full.keys[layer, b, :, :n], self.full.scale)
                lse = at_least_fp32(z[..., self.firsts[b] : self.edges[b]]).logsumexp(-1)
                self.select(slice(layer, layer + 1), slice(b, b + 1), z[None, None], lse[None, None], plan)

    def plan(self, slow):
        return [(0, 0, n, 1) if slow[b] else (self.firsts[b] + self.counts[b], self.edges[b], n, 0)
                for b, n in enumerate(self.lengths)]

    def finish(self, rows):
        for b, (_, _, n, slow) in enumerate(rows):
            if slow:
                self.finish_row(b, n)

    def reads(self, layer, b, n):
        """Absolute positions [G, n'] that a fast step of sequence b reads at length n, ascending."""
        heads, device = self.positions.shape[2], self.positions.device
        sink, recent = (torch.arange(low, high, device=device).expand(heads, -1)
                        for low, high in ((0, self.firsts[b]), (self.edges[b], n)))
        return torch.cat([sink, self.positions[layer, b, :, : self.counts[b]], recent], dim=-1)

    def finish_row(self, b, n):
        """What fast steps read from now on: the candidates were [first, edge) of n tokens."""
        self.firsts[b] = min(self.config.sink, n)
        self.edges[b] = max(self.firsts[b], n - self.config.recent)
        self.counts[b] = min(self.positions.shape[-1], self.edges[b] - self.firsts[b])


@functools.cache
def main_stream(device):
    """What steps are captured on: of high priority, so that the layers go before a Selector beside them.

    And never the Selector's own, which torch.cuda.graph's default can be: streams of one priority are handed out in
    turn, from a pool of 32. One for all steps, since cuBLAS keeps a workspace for each.
    """
    return torch.cuda.Stream(device, priority=-1)


class Stepper:
    """Runs decode steps of one memory over static tensors; on CUDA each kind of step is captured once, then replayed.

    A step begins by copying `staging` to the device and ends by copying the likeliest tokens back, so that a captured
    one is a single launch. Overlap stays inside a step: it ends when the selections it made are in place.
    """

    def __init__(self, model, memory, capture=None):
        self.model, self.memory, batch = model, memory, memory.batch
        self.on_gpu = model.device.type == "cuda"
        self.capture = self.on_gpu if capture is None else capture
        # A row: the input token and the four numbers of its plan.
        self.staging = torch.zeros(batch, 5, dtype=torch.int32, pin_memory=self.on_gpu)
        self.inputs = torch.zeros(batch, 5, dtype=torch.int32, device=model.device)
        self.drawn = torch.zeros(batch, dtype=torch.int64, pin_memory=self.on_gpu)
        self.graphs = {}
        for slow in memory.kinds if self.capture else ():
            self.warm(slow)

    def stage(self, tokens, rows):
        self.wait()                                         # the last step may still be copying
        self.staging.numpy()[:] = [(token, *row) for token, row in zip(tokens, rows)]

    def wait(self):
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def compute(self, slow):
        """logits [B, V] of the step that `staging` describes."""
        self.inputs.copy_(self.staging, non_blocking=True)
        plan = self.inputs[:, 1:].contiguous()
        step = Step(plan[:, 2:3].long() - 1, plan, slow)
        hidden = self.model.forward(self.inputs[:, :1].long(), step, self.memory)
        logits = self.model.head(hidden[:, -1])
        self.memory.join()
        self.drawn.copy_(logits.argmax(-1), non_blocking=True)
        return logits

    def warm(self, slow):
        """Compile, run once on the slot that the first step will write again, then capture."""
        self.stage([0] * self.memory.batch, [(0, 0 if slow else n, n + 1, int(slow)) for n in self.memory.lengths])
        self.compute(slow)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=main_stream(self.model.device)):
            logits = self.compute(slow)
        self.graphs[slow] = graph, logits

    def __call__(self, tokens, rows):
        """Start the step with input `tokens` and plan `rows`, lists of B -> its logits [B, V].

        They are overwritten by the next call.
        """
        slow = any(row[3] for row in rows)
        self.stage(tokens, rows)
        if not self.capture:
            return self.compute(slow)
        graph, logits = self.graphs[slow]
        graph.replay()
        return logits

    def likeliest(self):
        """Wait for the step under way -> the likeliest tokens, a list of B."""
        self.wait()
        return self.drawn.tolist()

    def confidence(self, logits):
        """The probability of the likeliest token, for logits [B, V] -> [B]: what `doubt` is compared with.

        A method, so that bench/quality.py can put another signal in its place.
        """
        return logits.softmax(-1).amax(-1)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0, the default, takes the likeliest. top_k 0, top_p 1 and min_p 0 keep all."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_knobs(self, dict(temperature=(0, 1e6), top_k=(0, 2**31), top_p=(1e-9, 1), min_p=(0, 1),
                               seed=(0, 2**63 - 1)))
        if 0 < self.temperature < 1e-6:     # logits divided by it would overflow
            raise ValueError(f"temperature must be 0 or at least 1e-06, not {self.temperature!r}")


def sample(logits, sampling, generator):
    """Draw one token id from logits [V]. Filters apply in the order temperature, top-k, top-p, min-p."""
    p = (logits.double().cpu() / sampling.temperature).softmax(-1)
    p, ids = p.sort(descending=True, stable=True)
    if sampling.top_k:
        p[sampling.top_k :] = 0
    p /= p.sum()                                                            # top-p is a share of what top-k has left
    keep = (p.cumsum(-1) - p < sampling.top_p) & (p >= sampling.min_p * p[0])
    return int(ids[torch.multinomial(p * keep, 1, generator=generator)])


def prefill(model, memory, prompts, chunk=None, progress=None):
    """Feed each prompt (a list of ids) to its row of a FullMemory, `chunk` tokens at a time -> logits [B, V].

    progress(tokens), if given, is called after each chunk. The chunk changes the result by rounding alone.
    SPEC section 3.
    """
    chunk = chunk or (2048 if model.device.type == "cuda" else 512)
    last = []
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)                   # [1, T]
        for start in range(0, len(prompt), chunk):
            part = ids[:, start : start + chunk]
            positions = torch.arange(start, start + part.shape[1], device=model.device)[None]
            hidden = model.forward(part, Chunk(row, start, positions), memory)
            if progress:
                progress(part.shape[1])
        last.append(hidden[:, -1])
        memory.lengths[row] = len(prompt)
    return model.head(torch.cat(last))


@dataclass(frozen=True)
class StepRecord:
    """One step of one sequence: "slow" or "fast", why it was slow, tokens it read per layer and KV head, N, seconds.

    reason: prefill, sentence, interval, doubt or always; None for a fast step. seconds: the whole batch's step, 0 for
    prefill.
    """
    kind: str
    reason: str | None
    read: int
    length: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Token:
    """What one step of the decode loop gave: an id (None if it has ended) and a StepRecord per sequence, logits [B, V].

    The tokens were drawn from these logits, which the next step overwrites.
    """
    step: int
    ids: list
    records: list
    logits: torch.Tensor


@torch.inference_mode()
def decode(model, memory, logits, config, max_new_tokens, sentences=((), ()), stop_ids=(), sampling=Sampling(),
           forced=None, stepper=None):
    """Yield one Token per step, from step 0 with prefill's logits [B, V] on.

    memory: prefilled. sentences: (ends, blank) for the Trigger. forced: at least max_new_tokens ids per sequence, to
    feed instead of drawing. stepper: what runs the steps, made here if None. SPEC sections 3 and 4.
    """
    batch = memory.batch
    stepper = stepper or Stepper(model, memory)
    memory.start()
    triggers = [Trigger(config, *sentences) for _ in range(batch)]
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in range(batch)]
    ended = [False] * batch
    records = [StepRecord("slow", "prefill", n, n) for n in memory.lengths]
    drawn = logits.argmax(-1).tolist()
    for step in range(max_new_tokens):
        if forced is not None:
            ids = [row[step] for row in forced]
        elif sampling.temperature:
            ids = [sample(row, sampling, g) for row, g in zip(logits, generators)]
        else:
            ids = drawn
        yield Token(step, [None if over else token for token, over in zip(ids, ended)], records, logits)
        ended = [over or token in stop_ids for token, over in zip(ids, ended)]
        if all(ended) or step + 1 == max_new_tokens:
            return
        begin = time.perf_counter()
        reasons = [None if over else trigger(step + 1, token) for trigger, token, over in zip(triggers, ids, ended)]
        for b, over in enumerate(ended):
            memory.lengths[b] += not over
        # A sequence that has ended keeps its place in the batch and reads the one slot behind its last token.
        rows = [(0, n, n + 1, 0) if over else row
                for row, over, n in zip(memory.plan([r is not None for r in reasons]), ended, memory.lengths)]
        logits = stepper(ids, rows)
        memory.finish(rows)
        read = [compact + end - start for compact, start, end, _ in rows]
        if config.doubt and None in reasons:
            again = [reason is None and not over and trigger.doubts(step + 1, sure) for reason, over, trigger, sure
                     in zip(reasons, ended, triggers, stepper.confidence(logits).tolist())]
            if any(again):
                # Same token, same position: its cache row is written over. The other rows only repeat themselves.
                rows = [(0, 0, row[2], 1) if redo else (*row[:3], 0) for row, redo in zip(rows, again)]
                logits = stepper(ids, rows)
                memory.finish(rows)
                read = [n + row[2] * redo for n, row, redo in zip(read, rows, again)]
                reasons = ["doubt" if redo else reason for reason, redo in zip(reasons, again)]
        drawn = stepper.likeliest()
        seconds = time.perf_counter() - begin
        records = [StepRecord("slow" if reason else "fast", reason, n, row[2], seconds)
                   for reason, n, row in zip(reasons, read, rows)]


@dataclass(frozen=True)
class Generation:
    """What one sequence wrote: its ids (the stop token included), a StepRecord per id, and prefill's seconds."""
    ids: list
    steps: list
    prefill_seconds: float = 0.0


def check_count(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_ids(name, ids, vocabulary):
    wrong = next((id for id in ids if not 0 <= id < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"{name} holds token id {wrong}, outside the vocabulary of {vocabulary}")


def read_prompts(model, prompts, config, max_new_tokens, chunk=None, progress=None):
    """Prefill a batch of id lists, after checking that all of it will fit -> FullMemory, logits [B, V], seconds.

    Raises ValueError for an empty prompt, an id outside the vocabulary, more tokens than the model has positions, or a
    max_new_tokens or chunk that is no count.
    """
    limit = model.config.max_position_embeddings
    check_count("max_new_tokens", max_new_tokens)
    for prompt in prompts or [[]]:
        if not prompt:
            raise ValueError("the prompt is empty")
        check_ids("the prompt", prompt, model.config.vocab_size)
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(f"{len(prompt)} prompt tokens and {max_new_tokens} new ones exceed the model's "
                             f"{limit} positions (max_position_embeddings)")
    if chunk is not None:
        check_count("chunk", chunk)
    begin = time.perf_counter()
    with torch.inference_mode():
        capacity = max(map(len, prompts)) + max_new_tokens
        # No window sees more than a sequence holds, which is at most 63 more: capacity is rounded up.
        memory = FullMemory(model, len(prompts), capacity,
                            min(max(config.bootstrap_queries, config.evidence_queries), capacity + 63))
        logits = prefill(model, memory, prompts, chunk, progress)
        if not logits.isfinite().all():                                     # waits for the device, as the clock needs
            raise ValueError("the model's logits are not finite: its weights are damaged or overflow in this dtype")
    return memory, logits, time.perf_counter() - begin


def sentence_tokens(model):
    """The (ends, blank) id sets of the model's tokenizer; empty for a model that has none."""
    return model.tokenizer.sentence_tokens() if model.tokenizer else (frozenset(), frozenset())


def generate(model, prompt_ids, config=SFIConfig(), mode="sfi", max_new_tokens=128, sampling=Sampling(),
             sentences=None, stop_ids=None, forced=None, chunk=None):
    """Continue one prompt (its ids), or a batch (a list of lists of ids) -> a Generation, or a list of them.

    mode "sfi" or "full". sentences and stop_ids default to what the model's tokenizer and configuration say; forced
    feeds given ids instead of drawing them: a list, or one per prompt, of at least max_new_tokens.
    Raises ValueError as read_prompts, and for an unknown mode or forced ids that are too few or none of the vocabulary;
    TypeError for what is no list of ids. SPEC section 8.
    """
    if mode not in ("sfi", "full"):
        raise ValueError(f"mode must be sfi or full, not {mode!r}")
    # A tensor of one number has __len__ too.
    batched = hasattr(prompt_ids, "__iter__") and any(
        hasattr(row, "__len__") and getattr(row, "ndim", 1) > 0 for row in prompt_ids)

    def lists(name, rows):
        try:
            return [[operator.index(id) for id in row] for row in (rows if batched else [rows])]
        except TypeError:
            raise TypeError(f"{name} must hold token ids, a list or a list of lists as prompt_ids is") from None

    prompts = lists("prompt_ids", prompt_ids)
    check_count("max_new_tokens", max_new_tokens)
    if forced is not None:
        forced = lists("forced", forced)
        if len(forced) != len(prompts):
            raise ValueError(f"forced has {len(forced)} rows for {len(prompts)} prompts")
        for row in forced:
            if len(row) < max_new_tokens:
                raise ValueError(f"forced holds {len(row)} ids, fewer than max_new_tokens = {max_new_tokens}")
            check_ids("forced", row, model.config.vocab_size)
    memory, logits, seconds = read_prompts(model, prompts, config, max_new_tokens, chunk)
    if mode == "full":
        config = replace(config, policy="always")
    else:
        memory = SlowFastMemory(model, memory, config)
    results = [Generation([], [], seconds) for _ in prompts]
    for token in decode(model, memory, logits, config, max_new_tokens,
                        sentence_tokens(model) if sentences is None else sentences,
                        model.stop_ids if stop_ids is None else stop_ids, sampling, forced):
        for result, id, record in zip(results, token.ids, token.records):
            if id is not None:
                result.ids.append(id)
                result.steps.append(record)
    return results if batched else results[0]


if __name__ == "__main__":
    from cli import main
    signal.signal(signal.SIGINT, ctrl_c)
    sys.exit(main())
