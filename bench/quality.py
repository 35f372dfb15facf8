"""Quality: full KV, SFI and what SFI must beat, on the same documents, in one table and one JSON file.

A case is a prompt with the tokens to feed after it. A method is a preset with knobs in a memory class. Each case is
prefilled once; every method then decodes from that same prompt: *forced*, on given tokens, for distances to full KV,
and *free*, for what it writes. The controls (recency, exact top-K) are small memories of this file. It knows nothing
of how a selection is made or a model computed. Paper: its quality section. SPEC section 7.

    python bench/quality.py methods                     forced and free, every method (--help: lengths, documents, ...)
    python bench/quality.py curve | needle | doubt      quality by budget; by depth and length; by doubt signal
    python bench/quality.py why                         who looks facts up, how early, and which stage drops them
    python bench/quality.py text FILE                   forced on the end of any text
    python bench/quality.py file [FILE.jsonl]           lines in the shape of LongBench or LongBench v2
Finished cells of case and method are kept in --output and not computed again.
"""
import hashlib
import json
import math
import multiprocessing
import os
import re
import string
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Callable

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import model as qwen3
import plot
import selector
import text
from cli import Parser
from fidelity import Probe
from kernels import publish_torch
from selector import SelectorConfig, support
from sfi import PRESETS, RETAINS, SFIConfig, SlowFastMemory, Stepper, decode, read_prompts, sentence_tokens

REPORTED, TUNED = 500_000, 600_000              # first held-out seeds: of results, and of choosing settings
RETAIN = 0.12
NEUTRAL = dict(lambda_cap_single=0.0, lambda_cap_multi=0.0, nms_alpha=0.0, exclusivity_alpha=0.0, spread=0)
MARGIN = 16                                     # tokens that a free answer may be longer than the true one


# Methods

class Scored(SlowFastMemory):
    """A memory that selects the K candidates of highest `scores`: no other stage of the Selector has a say."""

    def scores(self, logits):
        """[n, B, G, 1, N] for evidence logits [n, B, G, R, N]."""
        raise NotImplementedError

    def select(self, layers, rows, logits, lse, plan):
        self.put(layers, rows, self.scores(logits[..., : plan[0, 2].item()]), plan)

    def put(self, layers, rows, scores, plan):
        full, config = self.full, self.config
        publish_torch(scores, None, full.key_norms[layers, rows], full.keys[layers, rows], full.values[layers, rows],
                      plan, config.sink, config.recent, SelectorConfig(**NEUTRAL), self.positions[layers, rows],
                      self.compact_keys[layers, rows], self.compact_values[layers, rows])


class Recency(Scored):
    """The latest K candidates: as many tokens in every step as any selection has, chosen without looking."""

    def scores(self, logits):
        return torch.arange(logits.shape[-1], device=logits.device).float().expand_as(logits[..., :1, :])


class Exact(Scored):
    """The ceiling: every step looks at all tokens, then selects by this very step's attention. For one sequence.

    The candidates are still those of the last slow step, so that it attends to as many tokens as any selection.
    """

    def __init__(self, model, full, config):
        super().__init__(model, full, config, overlap=False, group=1)

    def scores(self, logits):
        return logits.float().softmax(-1).mean(-2, keepdim=True).log()

    def attend(self, layer, q, k, v, step):
        if not step.slow:
            full, logits, (_, _, end, _) = self.full, self.logits[0], step.plan[0].tolist()
            dense = step.plan.new_tensor([(0, 0, end, 1)])
            full.ops.attend(q[:, 0], k[:, 0], v[:, 0], full.keys[layer], full.values[layer], None, None, dense,
                            full.scale, full.key_norms[layer], None, 1, logits[0], self.lse[0, 0])
            dense[0, 2] = self.edges[0] + self.config.recent
            self.put(slice(layer, layer + 1), slice(None), self.scores(logits[..., :end]), dense)
        return super().attend(layer, q, k, v, step)


@dataclass(frozen=True)
class Method:
    """How a case is decoded: a preset with knobs on top, in one of the memory classes.

    retain: K as a fraction of the prompt. budget: instead, the fraction of the prompt that a fast step reads right
    after a slow one; at most half of it is recent. like: the method whose slow steps are as many, here at even
    distances. signal: what doubt looks at. dense: every step looks at all tokens, whatever it attends to.
    """
    name: str
    preset: str = "robust"
    knobs: dict = field(default_factory=dict)
    memory: type = SlowFastMemory
    retain: float = RETAIN
    budget: float | None = None
    like: str | None = None
    signal: str = "probability"
    dense: bool = False

    def config(self, tokens, steps=0, slow=0):
        """The SFIConfig for a prompt of so many tokens; steps and slow: those of the case and of `like`'s run of it."""
        knobs = dict(selected=round(self.retain * tokens)) | self.knobs
        if self.budget is not None:
            total, base = round(self.budget * tokens), SFIConfig.preset(self.preset)
            knobs["recent"] = min(base.recent, total // 2)
            knobs["selected"] = max(0, total - base.sink - knobs["recent"])
        if self.like:
            every = next((n for n in range(1, steps + 1) if steps // n <= slow), steps + 1)
            knobs |= dict(policy="interval", refresh_interval=every)
        return SFIConfig.preset(self.preset, **knobs)

    def described(self):
        """As JSON can hold it, with the preset's knobs, so that a file of results knows if they change."""
        return asdict(self) | {"memory": self.memory.__name__, "knobs": PRESETS[self.preset] | self.knobs}


FULL = Method("full KV", "paper", dict(policy="always"))
PAPER, QUALITY, ROBUST = (Method(name, name) for name in ("paper", "paper-quality", "robust"))
SURE = Method("robust + doubt", "robust-doubt", retain=RETAINS["robust-doubt"])
RECENCY = Method("recency", "robust", {}, Recency)
EVIDENCE = Method("evidence alone", "paper", NEUTRAL)
EXACT = Method("exact top-K", "paper", {}, Exact, dense=True)


def custom(text):
    """A Method from "PRESET,knob=value,..."; retain is a knob too. Raises ValueError for what is not one."""
    preset, *pairs = text.split(",")
    knobs = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            knobs[name] = json.loads(value)
        except ValueError:
            knobs[name] = value
    method = Method(text, preset, {name: v for name, v in knobs.items() if name != "retain"},
                    retain=knobs.get("retain", RETAINS.get(preset, RETAIN)))
    method.config(1000)                                                     # a bad knob is refused here
    return method


def without(method, **stages):
    """`method` with each stage named switched off in turn."""
    return [replace(method, name=f"{method.name} - {stage.replace('_', ' ')}", knobs=method.knobs | knobs)
            for stage, knobs in stages.items()]


STAGES = dict(prior=dict(lambda_cap_single=0.0, lambda_cap_multi=0.0), soft_NMS=dict(nms_alpha=0.0),
              exclusivity=dict(exclusivity_alpha=0.0))
METHODS = [FULL, PAPER, QUALITY, ROBUST, SURE, *without(PAPER, **STAGES),
           *without(ROBUST, **STAGES, spread=dict(spread=0), evidence_window=dict(evidence_queries=1),
                    alpha=dict(alpha=0.5)),
           EVIDENCE, Method("evidence window alone", "robust", NEUTRAL), RECENCY,
           replace(SURE, name="recency + doubt", memory=Recency),
           Method("bootstrap only", "robust", dict(policy="never")),
           Method("robust, even steps", "robust", like="robust"), EXACT]
SIGNALS = ("probability", "entropy", "margin", "drop", "sink")


# Cases

@dataclass(frozen=True)
class Case:
    """A prompt, the tokens fed after it (None: those that full KV writes), and what is known of them.

    values: for each marked value, the indices of its tokens in `forced`. score(text) -> measures of a written answer;
    without it there is no free run. limit: tokens that a free run may write.
    """
    name: str
    group: str
    prompt: list
    forced: list | None
    values: list = field(default_factory=list)
    score: Callable | None = None
    limit: int = 0


def marked_case(model, name, group, prompt, answer, spans, score=None):
    """A Case from texts; spans: (start, end) in characters of `answer` of each value."""
    encoded = model.tokenizer.backend.encode(prompt + answer, add_special_tokens=False)
    split = next(i for i, (start, _) in enumerate(encoded.offsets) if start >= len(prompt))
    values = [[i - split for i in tokens] for tokens in text.span_tokens(spans, encoded.offsets, len(prompt))]
    forced = encoded.ids[split:]
    return Case(name, group, encoded.ids[:split], forced, values, score, len(forced) + MARGIN)


def turn_case(model, name, group, prompt, turn):
    """A Case of a chronicle's question: a written answer is scored value by value."""

    def score(written):
        right = text.right_values(turn, written)
        return {"free_right": (sum(right), len(right)), "free_exact": (float(written == turn.answer), 1)}

    return marked_case(model, name, group, prompt, turn.answer + text.END, turn.values, score)


def documents(model, lengths, count, seed):
    """`count` chronicles of each length and layout."""
    return [turn_case(model, f"{length} {layout} {seed + i}", f"{length} {layout}", document.prompt, document.turns[0])
            for length in lengths for i in range(count) for layout in text.LAYOUTS
            for document in [text.make_document(seed + i, length, layout)]]


def needle(model, length, depth, seed, haystack=None):
    """A chronicle, or `haystack`'s beginning, of about `length` tokens, one paragraph of facts at `depth` (0 to 1)."""
    rng = Random(seed)
    name = f"{length} {depth:g} {seed}"
    if haystack is None:
        straw = text.make_document(seed, length - 250, "scattered")
        who = next(n for n in text.make_names(rng, len(text.ONSETS)) if all(n[:2] != p[:2] for p in straw.people))
        facts = {(who, kind): [who] + [text.expand(rng, "{" + slot + "}") for slot in text.parse(lines[0])[3::2]]
                 for kind, lines in text.FACTS.items()}
        fact = " ".join(text.tell(rng, kind, facts[who, kind]) for kind in text.FACTS)
        turn, body = text.ask(list(text.FACTS), [who], facts), straw.body
    else:
        key = str(10_000 + int(90_000 * rng.random()))
        fact, turn = f"The pass key is {key}. Remember it: {key} is the pass key.", None
        body = haystack[: round(length * text.CHARS_PER_TOKEN)] + "\n\n"
    gaps = [m.end() for m in re.finditer(r"\n\n+" if turn else r"[.!?]\s+", body)]
    at = min([0, *gaps], key=lambda gap: abs(gap - depth * len(body)))
    body = body[:at] + fact + ("\n\n" if turn else " ") + body[at:]
    group = f"{length} {depth:g} deep"
    if turn:
        return turn_case(model, name, group, f"{body}Question: {turn.question}\nAnswer:", turn)
    return marked_case(model, name, group, f"{body}What is the pass key? The pass key is", f" {key}",
                       [(1, 1 + len(key))],
                       lambda written: {"free_right": (float(key in written), 1)})


def read(name):
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def text_cases(model, files, lengths, count):
    """The end of each text: `count` tokens forced after a prompt of each length."""
    cases = []
    for name in files:
        ids = model.tokenizer.encode(read(name))
        for length in lengths:
            if len(ids) < length + count:
                raise ValueError(f"{name} has {len(ids)} tokens, fewer than {length} + {count}")
            cases.append(Case(f"{length} {Path(name).name}", f"{length} text", ids[-length - count : -count],
                              ids[-count:]))
    return cases


def chronicle_lines(length, count, seed):
    """Lines of both LongBench shapes for the shipped checkpoint to answer, `count` of each. Wrong choices tell the same
    of the same people in other documents' words."""
    lines = []
    for i in range(count):
        documents = [text.make_document(seed + 4 * i + j, length, text.LAYOUTS[i % 2]) for j in range(4)]
        asked = [re.search(r"about (\w+)", d.turns[0].question)[1] for d in documents]
        line = dict(context=documents[0].body, input=documents[0].turns[0].question,
                    answers=[documents[0].answer.strip()])
        answers = [d.answer.strip().replace(name, asked[0]) for d, name in zip(documents, asked)]
        right = i % 4
        answers.insert(right, answers.pop(0))
        lines += [line, dict(context=line["context"], question=line["input"], answer="ABCD"[right],
                             **{f"choice_{c}": choice for c, choice in zip("ABCD", answers)})]
    return lines


def words(written):
    """LongBench's normal form: lower case, no punctuation, no articles."""
    plain = "".join(c for c in written.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1(written, answer):
    """Overlap of words, LongBench's qa_f1_score."""
    mine, true = words(written), words(answer)
    shared = (Counter(mine) & Counter(true)).total()
    return 2 * shared / (len(mine) + len(true)) if shared else 0.0


def line_case(model, number, line, limit, chat, hide_choices):
    """A Case of one JSON line: LongBench's (context, input, answers) or v2's (question, choice_A to choice_D, answer).

    A written choice is the letter it names, or else the choice whose words it matches best. A context that does not
    fit loses its middle, as LongBench does it. Raises ValueError for a line of another shape.
    """
    if {"context", "input", "answers"} <= line.keys():
        ask = line["input"]

        def score(written):
            return {"f1": (max(f1(written, a) for a in line["answers"]), 1),
                    "exact": (float(any(words(written) == words(a) for a in line["answers"])), 1)}
    elif {"context", "question", "answer", *(f"choice_{c}" for c in "ABCD")} <= line.keys():
        choices = {c: line[f"choice_{c}"] for c in "ABCD"}
        ask = line["question"]
        if not hide_choices:
            ask += "\nChoices:\n" + "\n".join(f"({c}) {choice}" for c, choice in choices.items())
            ask += '\n\nFormat your response as follows: "The correct answer is (insert answer here)".'

        def score(written):
            named = re.search(r"answer is:? \(?([A-D])\b", written) or re.match(r"\s*\(?([A-D])\b", written)
            choice = named[1] if named else max(choices, key=lambda c: f1(written, choices[c]))
            return {"choice": (float(choice == line["answer"]), 1)}
    else:
        raise ValueError(f"line {number} has neither context, input and answers nor context, question, choice_A to "
                         f"choice_D and answer, but {', '.join(sorted(line))}")

    def prompt(context):
        whole = f"{context}\n\nQuestion: {ask}" + ("" if chat else "\nAnswer:")
        return model.tokenizer.encode(model.tokenizer.chat([{"role": "user", "content": whole}], thinking=False)
                                      if chat else whole)

    ids = prompt(line["context"].rstrip("\n"))
    excess = len(ids) + limit - model.config.max_position_embeddings
    if excess > 0:
        context = model.tokenizer.encode(line["context"])
        keep = (len(context) - excess - 16) // 2                             # 16: the seams may tokenise otherwise
        print(f"line {number}: the middle {len(context) - 2 * keep} of {len(context)} context tokens are left out",
              file=sys.stderr)
        ids = prompt(model.tokenizer.decode(context[:keep]) + model.tokenizer.decode(context[-keep:]))
    return Case(f"line {number}", "choices" if "question" in line else "questions", ids, None, [], score, limit)


# Measuring one case

class Watch:
    """Per fast pass of a memory, mean over layers and KV heads: kept mass, the share of the exact top-K among the
    selected, and the sink's part of the kept mass."""

    def __init__(self, memory):
        self.memory, self.passes = memory, []

    def __call__(self, layer, b, p, row):
        _, start, end, _ = row
        if start == 0:
            return
        first, count = self.memory.firsts[b], self.memory.counts[b]
        chosen = self.memory.positions[layer, b, :, :count]
        held = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, chosen, True)
        best = support(p[:, first:start], count) + first
        sink = p[:, :first].sum(-1)
        kept = sink + p.gather(-1, chosen).sum(-1) + p[:, start:end].sum(-1)
        recall = held.gather(-1, best).float().mean(-1) if count else torch.ones_like(kept)
        if layer == 0:
            self.passes.append([])
        self.passes[-1].append(torch.stack([kept, recall, sink / kept]).mean(-1))

    def means(self):
        """(kept mass, recall, sink's part) of each fast pass."""
        return [torch.stack(layers).mean(0).tolist() for layers in self.passes]


class SignalStepper(Stepper):
    """A stepper that puts another signal of a missing selection, in [0, 1] and low where something is missing, in the
    place of the highest probability: decode's doubt rule acts on it. One sequence.

    entropy: 1 / perplexity. margin: highest less second probability. drop: the best logit against that of the last slow
    step, exponentiated. sink: the mass that is not on the sink.
    """

    def __init__(self, model, memory, signal, watch, logits):
        super().__init__(model, memory, capture=False)
        self.signal, self.watch, self.best = signal, watch, logits.max()

    def __call__(self, tokens, rows):
        self.dense = rows[0][1] == 0
        logits = super().__call__(tokens, rows)
        if self.dense:
            self.best = logits.max()
        return logits

    def confidence(self, logits):
        p = logits.double().softmax(-1)
        first, second = p.topk(2).values[0]
        return {"probability": lambda: first[None],
                "entropy": lambda: torch.special.entr(p).sum().neg().exp()[None],
                "margin": lambda: (first - second)[None],
                "drop": lambda: (logits.max() - self.best).clamp(max=0).exp()[None],
                "sink": lambda: torch.tensor([1.0 if self.dense else 1 - self.watch.means()[-1][2]])}[self.signal]()


def stepper_of(model, memory, method, logits, watched):
    """What runs a method's steps, and the Watch that it feeds if wanted or needed."""
    watch = Watch(memory)
    probe = Probe(memory, watch) if watched or method.signal == "sink" else memory
    if method.signal == "probability":
        return Stepper(model, probe, capture=False), watch
    return SignalStepper(model, probe, method.signal, watch, logits), watch


def forced_run(model, full, logits, config, method, case, sentences, watched):
    """Feed the case's tokens -> logits [n, V] from which each was to be predicted, StepRecords, a Watch."""
    memory = method.memory(model, full, config)
    stepper, watch = stepper_of(model, memory, method, logits, watched)
    said, records = [], []
    for token in decode(model, memory, logits, config, len(case.forced), sentences, (), forced=[case.forced],
                        stepper=stepper):
        said.append(token.logits[0].clone())
        records += token.records
    return torch.stack(said), records, watch


def free_run(model, full, logits, config, method, case, sentences):
    """The ids of a greedy run."""
    memory = method.memory(model, full, config)
    stepper, _ = stepper_of(model, memory, method, logits, False)
    return [token.ids[0] for token in decode(model, memory, logits, config, case.limit, sentences, model.stop_ids,
                                             stepper=stepper)]


def distances(case, said, reference):
    """Measures (sum, count) of the logits [n, V] against full KV's, on all tokens and on the tokens of values.

    Token 0 is predicted by prefill, alike for all, and left out.
    """
    full, ours = reference.double().log_softmax(-1), said.double().log_softmax(-1)
    ids = torch.tensor(case.forced, device=said.device)
    best = ours.argmax(-1)
    each = {"kl": (full.exp() * (full - ours)).sum(-1), "agreement": full.argmax(-1) == best,
            "nll_difference": (full - ours).gather(-1, ids[:, None])[:, 0], "right": ids == best}
    marked = sorted({i for value in case.values for i in value} - {0})
    return {name + suffix: (values[index].double().sum().item(), len(index))
            for suffix, index in (("", list(range(1, len(ids)))), ("_value", marked)) if index
            for name, values in each.items()}


def measure(model, full, prefilled, config, method, case, sentences, reference, watched):
    """One cell: measures, each (sum, count), of a method on a case -> the cell, its logits [n, V] and free ids.

    reference: None for full KV itself, else what that call gave last.
    """
    begin = time.perf_counter()
    full.rewind([len(case.prompt)])
    said, records, watch = forced_run(model, full, prefilled, config, method, case, sentences, watched)
    true, written = reference or (said, None)
    cell = distances(case, said, true)
    steps, reasons = records[1:], Counter(r.reason for r in records[1:] if r.reason)
    cell |= {"attended": (sum(r.read for r in steps), sum(r.length for r in steps)),
             "slow": (sum(r.kind == "slow" for r in steps), len(steps))}
    cell["read"] = (cell["attended"][1] if method.dense else cell["attended"][0], cell["attended"][1])
    for name, values in zip(("kept", "recall"), zip(*watch.means())):
        cell[name] = (sum(values), len(values))
    ids = None
    if case.score:
        # A run whose every likeliest token is the one fed is the free run itself.
        whole = case.forced[-1] in model.stop_ids or len(case.forced) == case.limit
        if whole and said.argmax(-1).tolist() == case.forced:
            ids = case.forced
        else:
            full.rewind([len(case.prompt)])
            ids = free_run(model, full, prefilled, config, method, case, sentences)
        written = written or ids
        cell |= case.score(model.tokenizer.decode(ids))
        same = ids == written
        cell["free_same"] = (float(same), 1)
        if not same:
            first = next((i for i, (a, b) in enumerate(zip(ids, written)) if a != b), min(len(ids), len(written)))
            cell["free_first"] = (first, 1)
    return cell | {"reasons": dict(reasons), "seconds": time.perf_counter() - begin}, (said, written)


@torch.inference_mode()
def run_case(model, case, methods, row, watched=True):
    """Add to `row`, {method name: cell}, the cells of one case that it lacks, full KV's first -> row."""
    sentences, tokens = sentence_tokens(model), len(case.prompt)
    window = max(max(c.bootstrap_queries, c.evidence_queries) for m in methods for c in [m.config(tokens)])
    full, prefilled, seconds = read_prompts(model, [case.prompt], SFIConfig(bootstrap_queries=window),
                                            max(case.limit, len(case.forced or ())))
    dense = FULL.config(tokens)
    if case.forced is None:
        case = replace(case, forced=free_run(model, full, prefilled, dense, FULL, case, sentences))
    cell, reference = measure(model, full, prefilled, dense, FULL, case, sentences, None, False)
    row[FULL.name] = cell | {"group": case.group, "tokens": tokens, "prefill_seconds": seconds}
    for method in methods:
        if method.name not in row:
            slow = row[method.like]["slow"][0] if method.like else 0
            config = method.config(tokens, len(case.forced) - 1, slow)
            row[method.name], _ = measure(model, full, prefilled, config, method, case, sentences, reference, watched)
    return row


# Results

class Results:
    """Cells by case and method in a JSON file, which is begun or, if its settings are the same, continued.

    Raises ValueError if a method or setting of the same name differs from the file's.
    """

    def __init__(self, path, settings, methods):
        self.path, self.settings, self.cells = Path(path), settings, {}
        self.methods = {m.name: m.described() for m in methods}
        if self.path.exists():
            try:
                old = json.loads(self.path.read_text())
                old = {name: dict(old[name]) for name in ("settings", "methods", "cells")}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} exists and holds no results: give another --output") from None
            for mine, theirs in ((self.settings, old["settings"]), (self.methods, old["methods"])):
                for name in mine.keys() & theirs.keys():
                    if json.loads(json.dumps(mine[name])) != theirs[name]:
                        raise ValueError(f"{path} holds results of another {name!r}: {theirs[name]}, now {mine[name]}; "
                                         "remove it or give another --output")
            self.methods, self.cells = old["methods"] | self.methods, old["cells"]

    def save(self):
        """Write all in one move, so that an interrupted run leaves a whole file."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"settings": self.settings, "methods": self.methods, "cells": self.cells}))
        os.replace(part, self.path)

    def pooled(self, method, metric, group=""):
        """Sum over count of a measure over the cases whose group begins with `group`, with its 95 % interval.

        Bootstrap over documents, 2,000 resamples -> (mean, low, high) or None where nothing was measured.
        """
        pairs = [row[method][metric] for row in self.cells.values()
                 if row[FULL.name]["group"].startswith(group) and metric in row.get(method, {})]
        if not pairs or not sum(n for _, n in pairs):
            return None
        pairs = torch.tensor(pairs, dtype=torch.float64)                    # [documents, 2]
        draws = torch.randint(len(pairs), (2000, len(pairs)), generator=torch.Generator().manual_seed(0))
        sums = pairs[draws].sum(1)
        ratios = sums[:, 0] / sums[:, 1].clamp(min=1e-9)
        low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return (pairs[:, 0].sum() / pairs[:, 1].sum()).item(), low, high


COLUMNS = {                     # heading: measure, its scale, digits, group within the length
    "values right %": ("right_value", 100, 1, ""),
    "values right % clustered": ("right_value", 100, 1, "clustered"),
    "values right % scattered": ("right_value", 100, 1, "scattered"),
    "free values right %": ("free_right", 100, 1, ""),
    "free same as full %": ("free_same", 100, 0, ""),
    "free exact %": ("free_exact", 100, 0, ""),
    "F1 %": ("f1", 100, 1, ""),
    "exact match %": ("exact", 100, 1, ""),
    "choices right %": ("choice", 100, 1, ""),
    "agreement % values": ("agreement_value", 100, 1, ""),
    "agreement % all": ("agreement", 100, 1, ""),
    "KL values": ("kl_value", 1, 4, ""),
    "KL all": ("kl", 1, 4, ""),
    "NLL difference": ("nll_difference", 1, 4, ""),
    "kept mass %": ("kept", 100, 1, ""),
    "top-K recall %": ("recall", 100, 1, ""),
    "attended %": ("attended", 100, 1, ""),
    "KV read %": ("read", 100, 1, ""),
    "slow steps %": ("slow", 100, 1, ""),
}
# Shown with their interval
INTERVALS = ("values right %", "values right % clustered", "values right % scattered", "KL all", "KL values")


def table(results, methods, group):
    """Markdown: a row per method over the cases of a group (a length); columns that nobody has are left out."""
    rows = []
    for method in methods:
        row = {}
        for heading, (metric, scale, digits, layout) in COLUMNS.items():
            value = results.pooled(method.name, metric, group + layout)
            if value is not None:
                row[heading] = f"{scale * value[0]:.{digits}f}"
                if heading in INTERVALS:
                    row[heading] += f" [{scale * value[1]:.{digits}f}, {scale * value[2]:.{digits}f}]"
        rows.append((method.name, row))
    headings = [h for h in COLUMNS if any(h in row for _, row in rows)]
    lines = ["| method | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(row.get(h, "-") for h in headings) + " |"
                              for name, row in rows])


def report(results, methods, groups):
    """Tables for each group as text, with how many cases and prompt tokens stand behind them."""
    parts = []
    for group in groups:
        full = [row[FULL.name] for row in results.cells.values() if row[FULL.name]["group"].startswith(group)]
        tokens = sum(cell["tokens"] for cell in full) / len(full)
        parts.append(f"{group.strip()}: {len(full)} cases, {tokens:.0f} prompt tokens on average\n\n"
                     + table(results, methods, group))
    return "\n\n".join(parts)


# Why a selection fails

class Spy(SlowFastMemory):
    """Reads everything in every step, and notes at each slow step which of `sources` (prompt positions [S]) each stage
    of the Selector would keep among its K best: `held` {step: [layer: [stage, G, S] bool]}. One sequence."""

    STAGES = ("log_evidence", "log_fused", "log_nms", "log_exclusive", "log_spread")

    def __init__(self, model, full, config, sources):
        super().__init__(model, full, config, group=1)
        self.sources, self.prompt, self.held = sources, full.lengths[0], {}

    def plan(self, slow):
        return [(0, 0, n, int(s)) for n, s in zip(self.lengths, slow)]

    def select(self, layers, rows, logits, lse, plan):
        end, config = plan[0, 2].item(), self.config
        lo = min(config.sink, end)
        hi = max(lo, end - config.recent)
        stages = selector.select(logits[0, 0, ..., :end], self.full.key_norms[layers, rows][0, 0, :, :end], lo, hi,
                                 config.selected, config.selector)
        kept = [selector.top(getattr(stages, stage), lo, config.selected) for stage in self.STAGES]
        self.held.setdefault(end - self.prompt, []).append(
            torch.stack([torch.isin(self.sources, positions) for head in kept for positions in head])
            .view(len(kept), -1, len(self.sources)))


def sources(document, offsets):
    """Prompt tokens that state each value of a document whose one question asks for everything: a list per value.

    offsets: (start, end) in characters of each token of the prompt.
    """
    question = document.turns[0].question
    names = re.fullmatch(r"What do we know about (.+)\?", question)[1].split(" and ")
    values, found = iter(document.answer[start:end] for start, end in document.values), []
    for name in names:
        for _, wordings in text.FACTS.values():
            told = [name] + [next(values) for _ in text.parse(wordings[0])[3::2]]
            [(at, spans)] = [(document.body.find(sentence), spans) for sentence, spans in
                             (text.fill(wording, told) for wording in wordings) if sentence in document.body]
            found += [[i for i, (start, end) in enumerate(offsets) if start < at + stop and end > at + first]
                      for first, stop in spans[1:]]
    return found


@torch.inference_mode()
def why(model, length, count, seed, methods, ahead=32):
    """Under full KV: which KV heads look facts up, how early they do, and what a method's stages drop.

    -> {"lookup" [L][G]: mean attention on a value's source (its tokens in the prompt, one to each side) in the step
    that predicts its first token; "ahead" [d]: the same d steps earlier, mean over lookup heads (lookup at
    least half of the best); "kept": method -> stage -> share of the source tokens that those heads keep at a slow
    step, of the values used before the next}.
    """
    masses, kept = [], {m.name: [] for m in methods}
    for i in range(count):
        document = text.make_document(seed + i, length, text.LAYOUTS[i % 2])
        case = turn_case(model, "", "", document.prompt, document.turns[0])
        places = sources(document, model.tokenizer.backend.encode(document.prompt, add_special_tokens=False).offsets)
        first_use = [value[0] for value in case.values]
        flat = torch.tensor([position for place in places for position in place])
        owner = [v for v, place in enumerate(places) for _ in place]
        full, prefilled, _ = read_prompts(model, [case.prompt], SFIConfig(), len(case.forced))
        for method in methods:
            full.rewind([len(case.prompt)])
            spy, seen = Spy(model, full, method.config(len(case.prompt)), flat), []

            def see(layer, b, p, row):
                seen.append(torch.stack([p[:, place[0] - 1 : place[-1] + 2].sum(-1) for place in places], dim=-1))

            stepper = Stepper(model, Probe(spy, see), capture=False)
            for _ in decode(model, spy, prefilled, spy.config, len(case.forced), sentence_tokens(model), (),
                            forced=[case.forced], stepper=stepper):
                pass
            # Step j is the one from whose logits token j is drawn; step 0 was prefill.
            mass = torch.stack(seen).unflatten(0, (-1, model.config.num_hidden_layers))     # [steps, L, G, values]
            slow = sorted(spy.held) + [len(case.forced)]
            for begin, end in zip(slow, slow[1:]):
                used = torch.tensor([begin < first_use[v] < end for v in owner])
                kept[method.name].append(torch.stack(spy.held[begin])[..., used])           # [L, stages, G, used]
        steps = torch.tensor(first_use)[None] - 1 - torch.arange(ahead + 1)[:, None]        # [ahead, values]
        at = mass[steps.clamp(min=0), :, :, torch.arange(len(places))]                      # [ahead, values, L, G]
        masses.append(at.masked_fill((steps < 0)[..., None, None], float("nan")))
    mass = torch.cat(masses, dim=1).nanmean(1)                                              # [ahead, L, G]
    heads = mass[0] >= mass[0].max() / 2
    return {"lookup": mass[0].tolist(), "ahead": mass[:, heads].mean(-1).tolist(),
            "kept": {name: dict(zip(Spy.STAGES, torch.cat(parts, dim=-1).float().mean(-1).transpose(1, 2)[heads]
                                    .mean(0).tolist())) for name, parts in kept.items()}}


def why_report(found):
    """What `why` found, as Markdown."""
    lookup = found["lookup"]
    lines = ["Attention on a value's source in the step that predicts it, by layer and KV head (%)", "",
             "| layer | " + " | ".join(f"head {g}" for g in range(len(lookup[0]))) + " |",
             "|---" * (1 + len(lookup[0])) + "|"]
    lines += [f"| {layer} | " + " | ".join(f"{100 * x:.0f}" for x in row) + " |" for layer, row in enumerate(lookup)]
    steps = [d for d in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if d < len(found["ahead"])]
    lines += ["", "The same, so many steps earlier, mean of the heads that look up (%)", "",
              "| steps earlier | " + " | ".join(map(str, steps)) + " |", "|---" * (1 + len(steps)) + "|",
              "| attention | " + " | ".join(f"{100 * found['ahead'][d]:.1f}" for d in steps) + " |", "",
              "Source tokens, of values used before the next slow step, that those heads keep after each stage (%)", "",
              "| method | " + " | ".join(stage.removeprefix("log_") for stage in Spy.STAGES) + " |",
              "|---" * (1 + len(Spy.STAGES)) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{100 * stages[stage]:.1f}" for stage in Spy.STAGES) + " |"
              for name, stages in found["kept"].items()]
    return "\n".join(lines)


# Command line

def parser():
    p = Parser(description="Quality of SFI beside full KV and its controls.", allow_abbrev=False)
    p.add_argument("command", choices=("methods", "curve", "needle", "doubt", "why", "text", "file"))
    p.add_argument("files", nargs="*",
                   help="text: texts; file: JSONL, by default lines made of chronicles; needle: a text to "
                   "hide a pass key in")
    p.add_argument("--model", default="tiny", help="folder or hub id (default: the shipped checkpoint)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16", "float16"))
    p.add_argument("--lengths", type=int, nargs="+", default=[4096], metavar="TOKENS")
    p.add_argument("--documents", type=int, default=10, help="of each length and layout, or of each needle place")
    p.add_argument("--seed", type=int, default=REPORTED, help="the first document's (default: %(default)s)")
    p.add_argument("--methods", nargs="*", metavar="NAME", help="by default all that the command knows")
    p.add_argument("--try", nargs="+", dest="tried", default=[], metavar="PRESET,KNOB=VALUE,...",
                   help="more methods: a preset with knobs, retain among them")
    p.add_argument("--retain", type=float,
                   help=f"K as a fraction of the prompt (default: {RETAIN}, with doubt {SURE.retain})")
    p.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5],
                   help="curve: what a fast step reads, as a fraction of the prompt")
    p.add_argument("--depths", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    p.add_argument("--thresholds", type=float, nargs="+", default=[0.5, 0.9, 0.99, 0.999, 0.9999, 0.99997],
                   help="doubt")
    p.add_argument("--forced", type=int, default=256, help="text: tokens to feed (default: %(default)s)")
    p.add_argument("--max-new-tokens", type=int, default=320, help="file: of an answer (default: %(default)s)")
    p.add_argument("--chat", action="store_true", help="file: ask in the model's chat template")
    p.add_argument("--hide-choices", action="store_true", help="file: do not show the choices to the model")
    p.add_argument("--jobs", type=int, default=1, help="processes, one case each (default: %(default)s)")
    p.add_argument("--no-watch", dest="watch", action="store_false", help="leave kept mass and recall out: faster")
    p.add_argument("--output", help="JSON file; a table is written beside it (default: bench/results/COMMAND.json)")
    return p


def check_ranges(a):
    """ValueError for a number that no run can use, before anything is loaded."""
    if a.output and not a.output.endswith(".json"):
        raise ValueError(f"--output must end in .json, for the table goes to the same name with .md, not {a.output!r}")
    if a.output and not Path(a.output).parent.is_dir():
        raise ValueError(f"{Path(a.output).parent} is not a folder")
    for flag, numbers, low, high in (
            ("--lengths", a.lengths, 1, math.inf), ("--documents", [a.documents], 1, math.inf),
            ("--forced", [a.forced], 2, math.inf), ("--max-new-tokens", [a.max_new_tokens], 1, math.inf),
            ("--jobs", [a.jobs], 1, math.inf), ("--depths", a.depths, 0, 1), ("--budgets", a.budgets, 0, 1),
            ("--thresholds", a.thresholds, 0, 1), ("--retain", [0 if a.retain is None else a.retain], 0, 1)):
        for number in numbers:
            if not low <= number <= high:
                raise ValueError(f"{flag} must be from {low} to {high}, not {number}")
    if a.command == "text" and not a.files:
        raise ValueError("text needs a file")


@lru_cache(maxsize=1)
def prepared(argv):
    """The model, cases, groups and methods that a command line asks for; each process prepares its own."""
    arguments = parser().parse_args(argv)
    model = qwen3.load(ROOT / "tiny" if arguments.model == "tiny" else arguments.model, arguments.device,
                       getattr(torch, arguments.dtype))
    if model.tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer.json")
    return model, *chosen_cases(model, arguments), chosen_methods(arguments)


def job(argv, index, row, watched):
    """One case in a process of the pool."""
    torch.set_num_threads(1)
    model, cases, _, methods = prepared(argv)
    return index, run_case(model, cases[index], methods, row, watched)


def evaluate(argv, jobs, results, watched):
    """Fill `results` with the cells it lacks, case by case, in `jobs` processes; saved after each case."""
    model, cases, _, methods = prepared(argv)
    rows = {i: results.cells.get(case.name, {}) for i, case in enumerate(cases)}
    todo = [i for i, row in rows.items() if any(m.name not in row for m in methods)]
    with tqdm(total=len(todo), desc="cases", file=sys.stderr) as bar, ExitStack() as stack:
        if jobs == 1:
            finished = ((i, run_case(model, cases[i], methods, rows[i], watched)) for i in todo)
        else:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")))
            finished = (f.result() for f in as_completed(pool.submit(job, argv, i, rows[i], watched) for i in todo))
        for i, row in finished:
            results.cells[cases[i].name] = row
            results.save()
            bar.update()


def chosen_methods(arguments):
    """The methods of a command, K and --methods applied. Raises ValueError for a name that it does not have."""
    known = {"curve": [PAPER, ROBUST, SURE, RECENCY, EVIDENCE, EXACT], "needle": [PAPER, ROBUST, SURE, RECENCY],
             "why": [PAPER, QUALITY, ROBUST], "file": [PAPER, ROBUST, SURE, RECENCY]}.get(
                 arguments.command, METHODS[1:])
    if arguments.command == "doubt":
        known = [replace(SURE, name="no doubt", knobs=dict(doubt=0.0))] + [
            replace(SURE, name=f"{signal} < {threshold:g}", knobs=dict(doubt=threshold), signal=signal)
            for signal in SIGNALS for threshold in arguments.thresholds]
    by_name = {m.name: m if arguments.retain is None else replace(m, retain=arguments.retain) for m in known}
    for name in arguments.methods or ():
        if name not in by_name:
            raise ValueError(f"--methods must be among {', '.join(by_name)}, not {name!r}")
    chosen = [by_name[name] for name in (by_name if arguments.methods is None else arguments.methods)]
    chosen += [custom(text) for text in arguments.tried]
    if not chosen:
        raise ValueError("--methods without a name needs --try")
    if arguments.command == "curve":
        return [replace(m, name=f"{m.name} @ {budget:g}", budget=budget) for m in chosen
                for budget in arguments.budgets]
    return chosen


def read_lines(files):
    """The objects of some JSONL files. Raises ValueError, naming file and line, for what is none."""
    lines = []
    for name in files:
        for number, line in enumerate(read(name).splitlines(), 1):
            if line.strip():
                try:
                    lines.append(json.loads(line))
                except (ValueError, RecursionError):
                    raise ValueError(f"{name}, line {number}: no JSON") from None
                if not isinstance(lines[-1], dict):
                    raise ValueError(f"{name}, line {number}: no JSON object")
    if not lines:
        raise ValueError(f"{', '.join(files)}: no lines")
    return lines


def chosen_cases(model, arguments):
    """The cases of a command, and the groups that its report has a table for."""
    a, groups = arguments, [f"{length} " for length in arguments.lengths]
    if a.command == "text":
        return text_cases(model, a.files, a.lengths, a.forced), groups
    if a.command == "file":
        lines = read_lines(a.files) if a.files else chronicle_lines(a.lengths[0], a.documents, a.seed)
        cases = [line_case(model, i + 1, line, a.max_new_tokens, a.chat, a.hide_choices or not a.files)
                 for i, line in enumerate(lines)]
        return cases, sorted({case.group for case in cases})
    if a.command == "needle":
        haystack = read(a.files[0]) if a.files else None
        return [needle(model, length, depth, a.seed + i, haystack) for length in a.lengths for depth in a.depths
                for i in range(a.documents)], groups
    return documents(model, a.lengths, a.documents, a.seed), groups


def main(argv=None):
    argv = tuple(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(argv)
    check_ranges(arguments)
    path = Path(arguments.output or ROOT / "bench" / "results" / f"{arguments.command}.json")
    model, cases, groups, methods = prepared(argv)
    if len({case.name for case in cases}) < len(cases):
        raise ValueError("two cases have the same name: give each file and number once")
    if arguments.command in ("curve", "needle"):
        plot.pyplot()                                                       # missing is said before the work
    if arguments.command == "why":
        found = why(model, arguments.lengths[0], arguments.documents, arguments.seed, methods)
        path.write_text(json.dumps(found))
        shown = why_report(found)
    else:
        results = Results(path, settings_of(arguments), methods)
        evaluate(argv, arguments.jobs, results, arguments.watch)
        wanted = {case.name for case in cases}
        results.cells = {name: row for name, row in results.cells.items() if name in wanted}
        shown = report(results, [FULL, *methods], groups)
        if arguments.command == "curve":
            plot.curve(curve_points(results, methods, groups[0]), path.with_suffix(".png"))
        if arguments.command == "needle":
            grids = {m.name: [[results.pooled(m.name, "right_value", f"{length} {depth:g} ")[0]
                               for length in arguments.lengths]
                              for depth in arguments.depths] for m in [FULL, *methods]}
            plot.needle(grids, arguments.depths, arguments.lengths, path.with_suffix(".png"))
            shown = needle_table(grids, arguments.depths, arguments.lengths) + "\n\n" + shown
    path.with_suffix(".md").write_text(shown + "\n")
    print(shown)


def settings_of(a):
    """All that a cell depends on beside its case's name and its method; a file is known by what it holds."""
    own = {"text": ("forced",),
           "file": ("max_new_tokens", "chat", "hide_choices", "lengths", "documents", "seed")}.get(a.command, ())
    held = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in a.files]
    return {name: getattr(a, name) for name in ("command", "model", "dtype", *own)} | ({"files": held} if held else {})


def needle_table(grids, depths, lengths):
    """Values right (%) by depth and length, a column of lengths per method, as Markdown."""
    lines = ["values right, %", "", "| depth | " + " | ".join(f"{name} {n}" for name in grids for n in lengths) + " |",
             "|---" * (1 + len(grids) * len(lengths)) + "|"]
    return "\n".join(lines + [f"| {100 * depth:g} % | " + " | ".join(f"{100 * x:.0f}" for grid in grids.values()
                                                                     for x in grid[i])
                              + " |" for i, depth in enumerate(depths)])


def curve_points(results, methods, group):
    """{method: [(fraction attended, fraction read, values right, KL)]} of budgets in ascending order."""
    points = {}
    for m in methods:
        numbers = [results.pooled(m.name, metric, group)[0] for metric in ("attended", "read", "right_value", "kl")]
        points.setdefault(m.name.split(" @ ")[0], []).append((m.budget, *numbers))
    return points


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"quality: {error}")
