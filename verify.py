"""Verify: find the first wrong number in a trace, whoever wrote it, and say what usually causes it.

Our own decoder and memories run over their tokens once more. Each intermediate that the trace holds is compared with
ours and then put in its place, so that every stage is computed from *their* inputs to it and one error is reported in
one stage only. What the trace lacks is ours. This file knows the stages' usual mistakes, not how stages are computed.
golden/README.md is the guide to it.

Symbols as in sfi.py; t tokens of a step (the prompt's T at step 0, else 1), n candidates, R evidence rows.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import selector
from kernels import at_least_fp32, rms_norm_torch, rotate_torch
from sfi import Stepper, Trigger, read_prompts, sentence_tokens
from trace import INPUTS, REASONS, SCORES, Trace, WatchedMemory, WatchedModel, key

# Largest accepted error per dtype of the trace: of what the model computes, relative to the largest number of the same
# vector, and of what the Selector computes from inputs that the trace holds, relative to max(1, |ours|) nats.
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-4), "float16": (1e-2, 1e-4), "bfloat16": (5e-2, 1e-4)}
SPREAD_TOLERANCE = 3e-7     # of log_spread, whose millionth breaks ties; more than a double stored in fp32 is off

# What to look at where none of the mistakes below explains a difference.
HINTS = {
    "reason": "sentence and blank token sets, arming, min_gap from the last slow step of any reason, step numbers",
    "length": "N counts the step's own token: T at step 0, T + j at step j",
    "edge": "edge = max(min(sink, N), N - recent) at a slow step, and stays until the next one",
    "q": "q/k norm before RoPE, RoPE's positions and base, YaRN's factor, the layer's input norm",
    "k": "q/k norm before RoPE, RoPE's positions and base, YaRN's factor, the layer's input norm",
    "v": "v has neither norm nor RoPE; the order of KV heads in the projection",
    "attention": "head mapping h // (H/G), scale D^-0.5, the positions read: sink, selected, recent with the own token",
    "hidden": "o_proj, residuals, post_attention_layernorm, silu(gate) * up, the router's softmax and norm_topk_prob",
    "logits": "the final norm, lm_head or the tied embedding",
    "ids": "greedy takes the highest logit; step j takes token j - 1 and gives token j",
    "evidence_logits": "head mapping h // (H/G), rows w * H/G + h, newest query first, scale D^-0.5, a row's own past",
    "key_norms": "the L2 norm, not its square, of k after k-norm and RoPE",
    "log_evidence": "softmax over the candidates alone, the power mean's alpha, blind rows, the final normalisation",
    "log_prior": "the signs of its terms, x from 0 to 1 over the candidates, the final normalisation",
    "lam": "<f, f - r> / ||f - r||^2 of probabilities, not of logarithms, clipped to [0, cap]",
    "log_fused": "(1 - lambda) f + lambda r, lambda the share of the prior",
    "log_nms": "ln s - a_nms (m - ln s), m the maximum within +-w/2 among the candidates",
    "log_exclusive": "share = softmax over the G heads of score / temperature; added a_ex ln share",
    "log_spread": "the maximum within +-spread of the scores, plus 1e-6 of the own one, in float64",
    "positions": "the K best of the last scores, absolute, ascending",
    "ends": "tokens whose text ends a sentence, closing quotes, brackets and white space allowed",
    "blank": "tokens whose text is only white space",
}


@dataclass
class Difference:
    """One number of theirs that is not ours."""
    sequence: int
    step: int
    layer: int | None
    stage: str
    index: list
    theirs: float
    ours: float
    error: float
    cause: str

    def __str__(self):
        place = f"sequence {self.sequence}, step {self.step}" + ("" if self.layer is None else f", layer {self.layer}")
        return (f"{place}, {self.stage}{self.index or ''}: theirs {self.theirs:.7g}, ours {self.ours:.7g}, "
                f"error {self.error:.2g}\n    {self.cause}")


@dataclass
class Stage:
    """How one stage fared: tensors compared, tensors that differ, the largest error, and what was accepted."""
    compared: int = 0
    differ: int = 0
    worst: float = 0.0
    tolerance: float = 0.0


@dataclass
class Report:
    """What verify found: a line on the trace, a Stage per name, and each stage's first Difference in order of time."""
    title: str
    stages: dict
    differences: list

    @property
    def code(self):
        """Exit code: 0 equal within tolerance, 1 not."""
        return 1 if self.differences else 0

    def __str__(self):
        lines = [self.title, f"{'stage':<16}{'compared':>9}{'differ':>8}{'worst error':>13}{'tolerance':>11}"]
        lines += [f"{name:<16}{s.compared:>9}{s.differ:>8}{s.worst:>13.2g}{s.tolerance:>11.1g}"
                  for name, s in sorted(self.stages.items(), key=lambda item: [*HINTS].index(item[0]))]
        lines += [f"{'then' if i else 'first difference'}: {found}" for i, found in enumerate(self.differences)]
        return "\n".join(lines if self.differences else [*lines, "equal within tolerance"])


# The usual mistakes of each stage: every function yields (what it is, a, b), and it is the cause if a equals b.

def rope_and_norm(name, theirs, ours, check, layer, positions, **_):
    cos, sin = (table[positions, None] for table in (check.model.cos, check.model.sin))         # [t, 1, D/2]
    size = (cos.square() + sin.square()).repeat(1, 1, 2)                # YaRN's attention factor, squared; else 1
    weight = check.model.parameters[f"model.layers.{layer}.self_attn.{name}_norm.weight"]

    def unturned(x):
        return rotate_torch(x, cos, -sin) / size

    even, odd = unturned(ours)[..., ::2], unturned(ours)[..., 1::2]
    yield ("RoPE pairs element i with i + 1; it is i with i + D/2", theirs,
           torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2))
    normed = rms_norm_torch(unturned(theirs), weight, check.model.config.rms_norm_eps)
    yield f"{name}_norm is missing: each head of {name} goes through an RMSNorm of its own before RoPE", rotate_torch(
        normed, cos, sin), ours
    for off in (1, -1):
        if positions.min() + off >= 0 and positions.max() + off < len(check.model.cos):
            near = [table[positions + off, None] for table in (check.model.cos, check.model.sin)]
            yield (f"RoPE's position is off by {off:+d}: the first token's is 0", theirs,
                   rotate_torch(unturned(ours), *near))


def attention(theirs, ours, check, b, layer, q, positions, memory, **_):
    full = getattr(memory, "full", memory)                                                      # prefill has only that
    keys, values = full.keys[layer, b], full.values[layer, b]                                   # [G, C, D]
    heads, n = keys.shape[0], int(positions[-1]) + 1
    everything = torch.arange(n, device=keys.device).expand(heads, -1)
    reads = everything if check.reasons[b] else memory.reads(layer, b, n)                       # [G, n']

    def attend(q, reads):
        index = reads[..., None].expand(-1, -1, keys.shape[-1])
        z = torch.einsum("tghd,gnd->tghn", q.unflatten(1, (heads, -1)), keys.gather(1, index)) * full.scale
        z = z.masked_fill(reads[:, None] > positions[:, None, None, None], -math.inf)
        return (at_least_fp32(z).softmax(-1).to(q.dtype) @ values.gather(1, index)).flatten(1, 2)

    mixed = attend(q.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2), reads)
    yield ("head mapping: query head h reads KV head h % G; it is h // (H/G)", theirs,
           mixed.unflatten(1, (heads, -1)).transpose(1, 2).flatten(1, 2))
    if not check.reasons[b]:
        edge = memory.edges[b]
        before, recent = reads[:, : edge - n], reads[:, edge - n :]
        yield "edge off by one: the recent part begins at edge + 1; it is edge", theirs, attend(
            q, torch.cat([before, recent[:, 1:]], dim=-1))
        yield "edge off by one: the recent part begins at edge - 1; it is edge", theirs, attend(
            q, torch.cat([before, (recent[:, :1] - 1).clamp(min=0), recent], dim=-1))
        yield "a fast step that reads all N tokens", theirs, attend(q, everything)
    if n > len(positions):
        yield "the step's own token is not read", theirs, attend(q, reads[:, :-1])


def evidence_logits(theirs, ours, check, **_):
    yield "the logits are not scaled by D^-0.5", theirs * check.model.config.head_dim**-0.5, ours
    rows = ours.unflatten(1, (-1, check.model.config.num_attention_heads // ours.shape[0]))
    yield "rows begin with the oldest query; it is the newest", theirs, rows.flip(1).flatten(1, 2)
    yield "rows are ordered h * W + w; it is w * H/G + h", theirs, rows.transpose(1, 2).flatten(1, 2)


def key_norms(theirs, ours, **_):
    yield "squared norms", theirs.sqrt(), ours


def log_evidence(theirs, ours, check, logits, lo, **_):
    alpha, hi = check.config.selector.alpha, lo + ours.shape[-1]
    whole = selector.evidence(logits, 0, logits.shape[-1], alpha)[..., lo:hi].log_softmax(-1)
    yield "softmax over all N tokens; it is over the candidates alone", theirs, whole
    for other, mean in ((0.0, "geometric"), (1.0, "arithmetic")):
        yield (f"the rows' {mean} mean; it is the power mean with alpha = {alpha}", theirs,
               selector.evidence(logits, lo, hi, other))


def log_prior(theirs, ours, **_):
    for base in (2, 10):
        terms = (ours / math.log(base)).log_softmax(-1)
        yield f"log base {base} inside the terms; every logarithm is natural", theirs, terms


def lam(theirs, ours, check, log_f, log_r, rows, **_):
    c = check.config.selector
    swapped = replace(c, lambda_cap_single=c.lambda_cap_multi, lambda_cap_multi=c.lambda_cap_single)
    yield ("lambda cap: the cap for several rows is used for one row, or the other way round", theirs,
           selector.mixing_weight(log_f, log_r, rows, swapped))


def log_fused(theirs, ours, log_f, log_r, lam, **_):
    geometric = torch.lerp(log_f, log_r, lam[..., None])
    yield "the geometric mixture; it is the arithmetic one", theirs.log_softmax(-1), geometric.log_softmax(-1)
    swapped = selector.fuse(log_f, log_r, 1 - lam)
    yield "lambda is taken for the share of the evidence; it is the prior's", theirs, swapped


def log_nms(theirs, ours, check, scores, **_):
    c = check.config.selector
    half = c.nms_window // 2
    for left, right, text in ((half, half - 1, "[i - w/2, i + w/2 - 1]"), (half - 1, half, "[i - w/2 + 1, i + w/2]"),
                              (c.nms_window, c.nms_window, "[i - w, i + w]")):
        if min(left, right) >= 0:
            padded = F.pad(scores, (left, right), value=-math.inf)
            highest = padded.unfold(-1, left + right + 1, 1).amax(-1)
            yield (f"NMS window even or odd: theirs is {text}; it is [i - w/2, i + w/2], w + 1 positions for an even w",
                   theirs, scores - c.nms_alpha * (highest - scores))


def log_exclusive(theirs, ours, check, scores, **_):
    c = check.config.selector
    yield "the stage is skipped", theirs, scores
    yield "the share is a softmax over positions; it is over heads", theirs, scores + c.exclusivity_alpha * (
        scores / c.exclusivity_temperature).log_softmax(-1)
    yield "the temperature is not used", theirs, selector.exclude(scores, c.exclusivity_alpha, 1.0, c.eps)


def log_spread(theirs, ours, check, scores, **_):
    yield "the stage is skipped", theirs, scores
    yield ("the millionth of the own score is missing, which decides between equal maxima", theirs,
           selector.window_max(scores, check.config.selector.spread))


MISTAKES = {"q": rope_and_norm, "k": rope_and_norm} | {f.__name__: f for f in (
    attention, evidence_logits, key_norms, log_evidence, log_prior, lam, log_fused, log_nms, log_exclusive, log_spread)}


def mistakes(name, theirs, ours, **sources):
    """The mistakes of one stage, those of any logarithm first."""
    if name.startswith("log_"):
        for base in (2, 10):
            yield f"log base {base}; every logarithm is natural", theirs * math.log(base), ours
    if name in MISTAKES:
        yield from MISTAKES[name](name=name, theirs=theirs, ours=ours, **sources)


class Check:
    """The `see` that compares each intermediate with theirs and goes on with theirs, or with ours where they gave none.

    `step`, `reasons` [B] (theirs; 0 is fast) and `active` [B] say where the run is; nothing is compared for a sequence
    that is not active.
    """

    def __init__(self, trace, model):
        self.trace, self.model, self.config = trace, model, trace.config
        if trace.dtype not in TOLERANCES:
            raise trace.error(f"dtype {trace.dtype!r} is not one of {', '.join(TOLERANCES)}")
        self.tolerance, self.selector_tolerance = max(TOLERANCES[trace.dtype], TOLERANCES[dtype_name(model)])
        self.stages, self.differences = {}, []
        self.step, self.reasons, self.active = 0, [1] * trace.batch, [True] * trace.batch
        self.lists = [{name: trace.integers(f"sequence.{b}.{name}", len(ids)) for name in ("reason", "length", "edge")}
                      for b, ids in enumerate(trace.ids)]
        for b, lists in enumerate(self.lists):
            for step, reason in enumerate(lists["reason"] or []):
                if not 0 <= reason < len(REASONS):
                    raise trace.error(f"sequence.{b}.reason is {reason} at [{step}], not from 0 to {len(REASONS) - 1}")

    def note(self, b, layer, name, error, tolerance, describe):
        """Enter one comparison; describe() -> (index, theirs, ours, cause) of a difference."""
        stage = self.stages.setdefault(name, Stage())
        stage.compared += 1
        stage.worst, stage.tolerance = max(stage.worst, error), max(stage.tolerance, tolerance)
        if error > tolerance:
            if not stage.differ:
                index, theirs, ours, cause = describe()
                self.differences.append(Difference(b, self.step, layer, name, index, theirs, ours, error, cause))
            stage.differ += 1

    def __call__(self, b, layer, name, ours, **sources):
        if name == "positions":
            ours = selector.top(sources["scores"], sources["lo"], ours.shape[-1])
        if not self.active[b]:
            return ours
        theirs = self.trace.tensor(key(b, self.step, layer, name), ours)
        if theirs is None:
            return ours
        tolerance = self.tolerance_of(b, layer, name)
        if name == "positions":
            return self.judge_positions(b, layer, theirs, ours, tolerance, **sources)
        theirs = theirs.to(ours.dtype)
        error = errors(name, theirs, ours, **sources)

        def describe():
            index = (error > tolerance).nonzero()[0].tolist()
            causes = (text for text, *pair in mistakes(name, theirs, ours, check=self, b=b, layer=layer, **sources)
                      if largest(errors(name, *pair, **sources)) <= tolerance)
            cause = next((f"cause: {text}" for text in causes), f"look at: {HINTS[name]}")
            return index, theirs[tuple(index)].item(), ours[tuple(index)].item(), cause

        self.note(b, layer, name, largest(error), tolerance, describe)
        return theirs

    def tolerance_of(self, b, layer, name):
        """What a stage may be off, by whether it is computed from numbers of the trace or from ours."""
        def given(*names):
            return all(key(b, self.step, layer, other) in self.trace for other in names)

        if name == "positions" and given("log_spread" if self.config.selector.spread else "log_exclusive"):
            return 0.0
        if name == "log_spread" and given("log_exclusive"):
            return min(SPREAD_TOLERANCE, self.selector_tolerance)
        return self.selector_tolerance if name in (*SCORES, "positions") and given(*INPUTS) else self.tolerance

    def judge_positions(self, b, layer, theirs, ours, tolerance, scores, lo, **_):
        """Theirs are right if their scores are the best ones: which of equal scores is taken is free.

        -> theirs to go on with, or ours where theirs are no positions of candidates.
        """
        heads, count = theirs.shape
        inside = theirs - lo
        wrong = (inside < 0) | (inside >= scores.shape[-1])
        wrong[:, 1:] |= theirs[:, 1:] <= theirs[:, :-1]
        if wrong.any():
            def describe():
                g, i = index = wrong.nonzero()[0].tolist()
                relative = "cause: indices into the candidates; a position counts from the sequence's first token"
                edge = "cause: edge off by one: the candidates are [first, edge)"
                cause = (relative if torch.equal(theirs + lo, ours) and lo else
                         edge if theirs[g, i] in (lo - 1, lo + scores.shape[-1]) else
                         "look at: positions ascend, are unique and lie in [first, edge)")
                return index, theirs[g, i].item(), ours[g, i].item(), cause
            self.note(b, layer, "positions", math.inf, tolerance, describe)
            return ours
        got, best = (scores.gather(-1, x - lo).double().sort(-1, descending=True).values for x in (theirs, ours))
        error = errors("log_spread", got, best)

        def describe():
            g = (error > tolerance).nonzero()[0, 0].item()
            row, lowest = scores[g].double(), best[g, -1]
            missed = max(set(ours[g].tolist()) - set(theirs[g].tolist()), key=lambda position: row[position - lo])
            taken = min(set(theirs[g].tolist()) - set(ours[g].tolist()), key=lambda position: row[position - lo])
            tied = row[taken - lo] - lowest <= tolerance * max(1.0, abs(lowest))
            cause = ("cause: tie at the K-th score: too many positions with that score were taken, "
                     "a better one left out"
                     if tied else f"look at: {HINTS['positions']}")
            return [g], taken, missed, f"scores there: {row[taken - lo]:.7g} and {row[missed - lo]:.7g}\n    {cause}"

        self.note(b, layer, "positions", largest(error), tolerance, describe)
        return theirs

    def whole(self, b, name, ours):
        """Compare the step's entry in one of the lists -> theirs, or ours where they gave none."""
        if self.lists[b][name] is None:
            return ours
        theirs = self.lists[b][name][self.step]
        cause = f"look at: {HINTS[name]}"
        if name == "edge" and abs(theirs - ours) == 1:
            cause = f"cause: edge off by one: {HINTS[name]}, N with the step's own token"
        if name == "reason":
            cause = f"theirs {REASONS[theirs]}, ours {REASONS[ours]}; {cause}"
        self.note(b, None, name, float(abs(theirs - ours)), 0.0, lambda: ([self.step], theirs, ours, cause))
        return theirs

    def emitted(self, b, logits):
        """Compare the logits [V] of a step, then the token that was drawn from them if that was the likeliest one."""
        logits = self(b, None, "logits", logits)
        id = self.trace.ids[b][self.step]
        if not self.trace.sampling.temperature:
            error = ((logits.max() - logits[id]) / logits.abs().max().clamp(min=1e-30)).item()
            self.note(b, None, "ids", error, self.tolerance,
                      lambda: ([self.step], id, logits.argmax().item(), f"look at: {HINTS['ids']}"))

    def sets(self):
        """The sentence-end and blank token ids: theirs, compared with the tokenizer's if there is one."""
        result = []
        for name, ours in zip(("ends", "blank"), sentence_tokens(self.model)):
            theirs = self.trace.integers(name)
            if theirs is not None and self.model.tokenizer:
                odd = sorted(ours ^ set(theirs))
                self.note(0, None, name, float(len(odd)), 0.0, lambda: (
                    [], len(theirs), len(ours), f"token id {odd[0]} is in one set only; look at: {HINTS[name]}"))
            if theirs is None and not self.model.tokenizer and self.config.policy == "sentence":
                raise self.trace.error(f"{name} is missing, and the model has no tokenizer to derive it from")
            result.append(ours if theirs is None else frozenset(theirs))
        return result


def dtype_name(model):
    return str(model.dtype).removeprefix("torch.")


def errors(name, theirs, ours, **sources):
    """The error of each number, as TOLERANCES counts it; -inf equals -inf."""
    a, b = theirs.double(), ours.double()
    gap = (a - b).abs().masked_fill(a == b, 0)
    if name == "lam":                       # what it does to the mixture: where f = r it does nothing
        f, r = sources["log_f"].double().exp(), sources["log_r"].double().exp()
        return gap * (f - r).abs().amax(-1) / f.amax(-1)
    size = b.abs().masked_fill(b.isinf(), 1)
    if name in SCORES:
        return gap / size.clamp(min=1)
    return gap / size.amax(-1, keepdim=True).clamp(min=1e-30)


def largest(error):
    return error.max().item() if error.numel() else 0.0


class TheirMemory(WatchedMemory):
    """A WatchedMemory whose edges [B] at the next slow step are given."""

    def __init__(self, model, full, config, see):
        super().__init__(model, full, config, see)
        self.given = [0] * self.batch

    def edge(self, b, n):
        return self.given[b]

    def finish_row(self, b, n):
        super().finish_row(b, n)
        self.edges[b] = self.given[b]
        self.counts[b] = min(self.positions.shape[-1], self.edges[b] - self.firsts[b])


@torch.inference_mode()
def verify(path, model, checkpoint):
    """Compare the trace at `path` with what `model` computes -> a Report; print it, exit with its .code.

    checkpoint: the folder or hub id the model was loaded from. For a trace in half precision load the model in float32,
    for the last word on rounding in float64. Raises ValueError or FileNotFoundError in one line for a bad trace.
    """
    trace = Trace(path, model, checkpoint)
    check, config, ids = Check(trace, model), trace.config, trace.ids
    sentences = check.sets()
    watched = WatchedModel(model, check)
    longest = max(map(len, trace.prompts))
    full, logits, _ = read_prompts(watched, trace.prompts, config, max(map(len, ids)), chunk=longest)
    memory = TheirMemory(watched, full, config, check)
    stepper = Stepper(watched, memory, capture=False)
    triggers = [Trigger(config, *sentences) for _ in ids]

    def begin(b, ours):
        """Compare kind, length and edge of a step before it runs; it then runs as theirs did."""
        reason, n = check.whole(b, "reason", REASONS.index(ours or "fast")), memory.lengths[b]
        check.whole(b, "length", n)
        first, ours = ((min(config.sink, n), WatchedMemory.edge(memory, b, n)) if reason
                       else (memory.firsts[b], memory.edges[b]))
        edge = check.whole(b, "edge", ours)
        memory.given[b] = edge if first <= edge <= n else ours              # nothing can be read from out of bounds
        memory.edges[b], check.reasons[b] = memory.given[b], reason

    for b in range(trace.batch):
        begin(b, "prefill")
    memory.start()
    for check.step in range(max(map(len, ids))):
        active = [check.step < len(row) for row in ids]
        if check.step:
            tokens = [row[min(check.step, len(row)) - 1] for row in ids]
            for b, on in enumerate(active):
                memory.lengths[b] += on
            confidence = [1.0] * trace.batch
            if config.doubt:                # the fast pass, whose intermediates a slow one may have replaced
                check.active = [False] * trace.batch
                logits = stepper(tokens, rows_of(memory, active, [False] * trace.batch))
                confidence = logits.softmax(-1).amax(-1).tolist()
            check.active = active
            for b, trigger in enumerate(triggers):
                if active[b]:
                    begin(b, judge(trigger, check, b, tokens[b], confidence[b]))
            rows = rows_of(memory, active, check.reasons)
            logits = stepper(tokens, rows)
            memory.finish(rows)
        for b, on in enumerate(active):
            if on:
                check.emitted(b, logits[b])
    left = sorted(trace.unread)
    if left:
        raise trace.error(f"{left[0]} belongs to no stage of this run: a step beyond the last, a selection at a fast "
                          f"step or without candidates, or a stage that is off")
    title = f"{path}: {trace.dtype}, steps {', '.join(str(len(row)) for row in ids)}; recomputed in {dtype_name(model)}"
    return Report(title, check.stages, check.differences)


def rows_of(memory, active, slow):
    """The plan of a step; a sequence that has ended reads the one slot behind its last token."""
    return [row if on else (0, n, n + 1, 0) for row, on, n in zip(memory.plan(slow), active, memory.lengths)]


def judge(trigger, check, b, token, confidence):
    """Our reason for the step; the trigger then goes on as if theirs had been its own."""
    theirs = check.lists[b]["reason"] and REASONS[check.lists[b]["reason"][check.step]]
    before = trigger.last_slow, trigger.last_doubt
    ours = trigger(check.step, token)
    # A probability within tolerance of the threshold may fall on either side of it.
    if theirs in ("fast", "doubt"):
        confidence += check.tolerance * (1 if theirs == "fast" else -1)
    if ours is None and check.config.doubt and trigger.doubts(check.step, confidence):
        ours = "doubt"
    if theirs:
        trigger.last_slow = before[0] if theirs == "fast" else check.step
        trigger.last_doubt = check.step if theirs == "doubt" else before[1]
    return ours
