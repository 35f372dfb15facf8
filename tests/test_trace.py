"""The oracle's promises: a trace is whole, a right one verifies, and every mistake is found at the stage that made it.

Mistakes are planted in the operations of the recorded run; the verifying one is clean.
"""
import importlib.util
import json
import math
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kernels
import model as qwen3
import selector
import sfi
import trace
from verify import TOLERANCES, verify

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("make_traces", ROOT / "golden" / "make_traces.py")
make_traces = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_traces)
GOLDENS, TRACES = make_traces.GOLDENS, make_traces.TRACES


@cache
def load(folder, dtype=torch.float32):
    return qwen3.load(folder, dtype=dtype)


def check(path, golden, dtype=torch.float32):
    return verify(path, load(golden.folder, dtype), golden.folder)


def read(path):
    """The tensors and the metadata of a trace."""
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def stages(report):
    return [difference.stage for difference in report.differences]


def record(path, golden, ops=kernels.TORCH, dtype=torch.float32, new_tokens=12, **keep):
    """Record a golden run with other operations, fewer steps and all tensors, unless `keep` says otherwise."""
    return make_traces.make(replace(golden, new_tokens=new_tokens, keep=keep), path, dtype, ops)


# Golden traces

@pytest.mark.parametrize("name", make_traces.available())
def test_golden_traces_have_not_drifted(name, tmp_path):
    golden, path = GOLDENS[name], TRACES / f"{name}.safetensors"
    report = check(path, golden)
    assert report.code == 0, report
    make_traces.make(golden, tmp_path / "new")
    (old, old_meta), (new, new_meta) = read(path), read(tmp_path / "new")
    assert {n: t.shape for n, t in old.items()} == {n: t.shape for n, t in new.items()}
    assert all(torch.equal(old[n], new[n]) for n in old if n.startswith("sequence") and n.split(".")[2] in trace.LISTS)
    assert {**old_meta, "versions": ""} == {**new_meta, "versions": ""}


def test_golden_traces_show_what_they_are_for():
    reasons = {name: [trace.REASONS[r] for r in load_file(TRACES / f"{name}.safetensors")["sequence.0.reason"]]
               for name in GOLDENS if (TRACES / f"{name}.safetensors").exists()}
    assert {"fast", "prefill", "sentence", "interval"} == set(reasons["paper"])
    assert "doubt" in reasons["doubt"] and "fast" in reasons["doubt"]
    assert "sentence" not in reasons["no-sentences"]
    batch = load_file(TRACES / "batch.safetensors")
    assert len({len(batch[f"sequence.{b}.prompt"]) for b in range(3)}) == 3
    assert len(batch["sequence.0.ids"]) < len(batch["sequence.1.ids"])          # one has ended, the others go on
    assert not any(name.endswith("step.0.layer.0.positions") and "sequence.0" in name for name in batch)    # 2 tokens
    everything = load_file(TRACES / "all-selected.safetensors")["sequence.0.step.7.layer.0.positions"]
    assert everything.tolist() == [list(range(4, 47 - 8))] * 2
    assert sum(path.stat().st_size for path in TRACES.iterdir()) < 8 << 20


def test_the_page_names_every_tensor_knob_reason_and_golden_trace():
    page = (ROOT / "golden" / "README.md").read_text()
    names = {f.name for cls in (sfi.SFIConfig, selector.SelectorConfig, sfi.Sampling) for f in fields(cls)}
    for name in names | set(trace.DEPTHS["tensors"]) | set(trace.LISTS) | set(trace.REASONS) | set(GOLDENS):
        assert re.search(rf"\b{name}\b", page), name
    for dtype, accepted in zip(TOLERANCES, ("1e-9", "1e-4", "1e-2", "5e-2")):
        assert TOLERANCES[dtype][0] == float(accepted)
    assert "1e-9, 1e-4, 1e-2, 5e-2" in page


# Recording

def test_depth_layers_and_steps_bound_what_is_written(tmp_path):
    golden, path = GOLDENS["paper"], tmp_path / "trace"
    record(path, golden, depth="steps")
    lists = {"ends", "blank", *(f"sequence.0.{name}" for name in trace.LISTS)}
    assert load_file(path).keys() == lists
    record(path, golden, depth="selection", layers=range(1, 2), steps=range(1, 12))
    found = load_file(path).keys() - lists
    assert {name.split(".layer.1.")[1] for name in found} == set(trace.DEPTHS["selection"]) - {"log_spread"}
    assert {int(name.split(".")[3]) for name in found} == {6, 10}               # the slow steps
    record(path, golden, layers=range(2), steps=range(3, 5))
    assert load_file(path).keys() - lists == {trace.key(0, j, layer, name) for j in (3, 4) for layer in (0, 1)
                                              for name in ("q", "k", "v", "attention", "hidden")} | {
                                                  trace.key(0, j, None, "logits") for j in (3, 4)}
    for bad in (dict(layers=range(2, 4)), dict(steps=range(12, 13)), dict(depth="all"), dict(steps=range(3, 3))):
        with pytest.raises(ValueError, match=next(iter(bad))):
            record(path, golden, **bad)


def test_a_recorded_run_is_the_run_itself(tmp_path):
    golden = GOLDENS["batch"]
    results = record(tmp_path / "trace", golden, new_tokens=24)
    model = load(golden.folder)
    plain = sfi.generate(model, make_traces.prompts(golden, model), golden.config, max_new_tokens=24,
                         sentences=golden.sentences, stop_ids=golden.stop_ids)
    for a, b in zip(results, plain):
        assert a.ids == b.ids
        assert [replace(s, seconds=0) for s in a.steps] == [replace(s, seconds=0) for s in b.steps]


def test_a_trace_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    path.write_bytes(b"older")

    def fail(tensors, target, metadata):
        Path(target).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(trace, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        record(path, GOLDENS["paper"], new_tokens=2)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"older"]
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        record(tmp_path / "nowhere" / "trace", GOLDENS["paper"])


# Right traces verify

@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_verify_within_their_tolerance(dtype, tmp_path):
    golden, path = GOLDENS["paper"], tmp_path / "trace"
    record(path, golden, dtype=dtype)
    report = check(path, golden, torch.float64)
    assert report.code == 0, report
    assert report.stages["q"].tolerance == TOLERANCES[str(dtype).removeprefix("torch.")][0]


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(lengths=st.lists(st.sampled_from([1, 2, 5, 20, 40]), min_size=1, max_size=3), knobs=st.fixed_dictionaries(dict(
    sink=st.sampled_from([0, 1, 4]), recent=st.sampled_from([0, 1, 8, 30]), selected=st.sampled_from([0, 1, 5, 40]),
    refresh_interval=st.integers(0, 9), min_gap=st.integers(0, 3), policy=st.sampled_from(sfi.POLICIES),
    evidence_queries=st.sampled_from([1, 2, 8, 99]), bootstrap_queries=st.sampled_from([1, 3, 999]),
    doubt=st.sampled_from([0, 0.2, 0.9]), alpha=st.sampled_from([0, 0.5, 2]), spread=st.sampled_from([0, 1, 8]))))
def test_a_run_verifies_whatever_its_knobs(tmp_path_factory, lengths, knobs):
    path = tmp_path_factory.mktemp("knobs") / "trace"
    golden = replace(GOLDENS["paper"], lengths=lengths, knobs=knobs, stop_ids=range(0, 512, 40))
    record(path, golden)
    report = check(path, golden)
    assert report.code == 0, report


def test_a_window_longer_than_the_sequence_has_all_its_rows(tmp_path):
    knobs = dict(sink=2, recent=4, selected=5, refresh_interval=2, evidence_queries=99)
    golden = replace(GOLDENS["paper"], lengths=[20], knobs=knobs)
    record(tmp_path / "trace", golden)
    tensors, _ = read(tmp_path / "trace")
    assert tensors[trace.key(0, 2, 0, "evidence_logits")].shape[1] == 2 * 99
    assert check(tmp_path / "trace", golden).code == 0


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_any_part_of_a_right_trace_verifies(tmp_path_factory, data):
    name = data.draw(st.sampled_from(["one-row", "robust", "doubt", "batch"]))
    tensors, meta = read(TRACES / f"{name}.safetensors")
    keep = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    chance = data.draw(st.randoms(use_true_random=False))
    needed = "prompt", "ids", "ends", "blank"
    part = {n: t for n, t in tensors.items() if n.endswith(needed) or chance.random() < keep}
    path = tmp_path_factory.mktemp("part") / "trace"
    save_file(part, path, meta)
    report = check(path, GOLDENS[name])
    assert report.code == 0, report


def test_equal_scores_may_be_taken_in_any_order(tmp_path):
    tensors, meta = read(TRACES / "paper.safetensors")
    scores, positions = (tensors[trace.key(0, 0, 1, n)] for n in ("log_exclusive", "positions"))
    order = scores[0].argsort(descending=True)
    scores[0, order[8]] = scores[0, order[7]]               # the best left out equals the last one in
    positions[0] = torch.cat([order[:7], order[8:9]]).sort().values + 4
    save_file(tensors, tmp_path / "trace", meta)
    assert "positions" not in stages(check(tmp_path / "trace", GOLDENS["paper"]))
    positions[0] = torch.cat([order[:7], order[9:10]]).sort().values + 4       # this one is lower
    save_file(tensors, tmp_path / "trace", meta)
    assert "positions" in stages(check(tmp_path / "trace", GOLDENS["paper"]))


# Wrong numbers are found

@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_every_number_counts(tmp_path_factory, data):
    golden = GOLDENS["one-row"]
    tensors, meta = read(TRACES / "one-row.safetensors")
    name = data.draw(st.sampled_from(sorted(n for n, t in tensors.items() if t.is_floating_point())))
    value = tensors[name].flatten()
    i = data.draw(st.integers(0, len(value) - 1).filter(lambda i: value[i].isfinite()))
    size = tensors[name].masked_fill(tensors[name].isinf(), 0).abs()
    value[i] += 0.03 * max(1.0, size.max().item())
    path = tmp_path_factory.mktemp("wrong") / "trace"
    save_file(tensors, path, meta)
    first = check(path, golden).differences[0]
    assert trace.key(first.sequence, first.step, first.layer, first.stage) == name
    if not name.endswith("lam"):
        assert np.ravel_multi_index(first.index, tensors[name].shape) == i


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("factor, code", [(0.5, 0), (2.0, 1)])
def test_the_tolerance_is_where_it_is_said_to_be(dtype, factor, code, tmp_path):
    golden, path = GOLDENS["paper"], tmp_path / "trace"
    record(path, golden, dtype=torch.float64, new_tokens=3)
    tensors, meta = read(path)
    model, inside = TOLERANCES[dtype]
    attention = tensors[trace.key(0, 2, 2, "attention")]
    attention[0, 1, 5] += factor * model * attention[0, 1].abs().max()
    scores = tensors[trace.key(0, 0, 2, "log_nms")]
    scores[1, 9] += factor * inside * scores[1, 9].abs()
    save_file(tensors, path, {**meta, "dtype": dtype})
    report = check(path, golden, torch.float64)
    assert report.code == code
    # Changed inputs are told from changed results: what follows from the changed numbers must not be blamed.
    assert stages(report)[:1] == ["log_nms"] * code
    assert set(stages(report)) <= {"log_nms", "log_exclusive", "attention", "hidden"}


def interleaved(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def without_norm(qkv, kv_heads, q_norm, k_norm, cos, sin, positions, eps):
    heads = qkv.unflatten(-1, (-1, q_norm.shape[0]))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos[positions, None], sin[positions, None]
    return kernels.rotate_torch(q, cos, sin), kernels.rotate_torch(k, cos, sin), v


def mapped(attend, q, heads, *rest):
    """Attention where query head h reads KV head h % G."""
    out = attend(q.unflatten(-2, (-1, heads)).transpose(-3, -2).flatten(-3, -2), *rest)
    return out.unflatten(-2, (heads, -1)).transpose(-3, -2).flatten(-3, -2)


def narrow_window(scores, window, strength):
    """w positions, [i - w/2, i + w/2 - 1], instead of w + 1."""
    padded = F.pad(scores, (window // 2, window // 2 - 1), value=-math.inf)
    return scores - strength * (padded.unfold(-1, window, 1).amax(-1) - scores)


def threshold(scores, lo, count):
    """The first `count` positions that reach the K-th score: a better one may come too late."""
    lowest = scores.topk(count).values[..., -1:]
    return torch.stack([row.nonzero()[:count, 0] for row in scores >= lowest]) + lo


def stale(logits, lse, key_norms, keys, values, plan, sink, recent, config, positions, *compact):
    """Positions are published, but after step 0 (of a prompt of 40 tokens) not into the compact buffer."""
    if plan[0, 2] > 40:
        compact = [buffer.clone() for buffer in compact]
    kernels.publish_torch(logits, lse, key_norms, keys, values, plan, sink, recent, config, positions, *compact)


class Hasty(sfi.Trigger):
    """Fires at the token that ends a sentence."""

    def __call__(self, step, token):
        self.armed |= token in self.ends
        return super().__call__(step, -1 if token in self.ends else token)


def oldest_first(window, *rest):
    return evidence_logits(window, *rest).unflatten(1, (len(window), -1)).flip(1).flatten(1, 2)


evidence, prior, mixing_weight = selector.evidence, selector.prior, selector.mixing_weight
causal_attention, evidence_logits, rope_tables = sfi.causal_attention, kernels.evidence_logits, qwen3.rope_tables
BUGS = {    # name: (golden run, patches of (where, what, by what), first stage, a part of its cause)
    "head mapping": ("paper", [
        (sfi, "causal_attention", lambda q, keys, *rest: mapped(causal_attention, q, keys.shape[1], keys, *rest)),
        ("attend", lambda q, k, *rest: mapped(kernels.attend_torch, q, k.shape[1], k, *rest))],
        "attention", "cause: head mapping"),
    "RoPE pairing": ("paper", [(kernels, "rotate_torch", interleaved)], "q", "cause: RoPE pairs element i with i + 1"),
    "RoPE pairing under YaRN": ("yarn", [(kernels, "rotate_torch", interleaved)], "q", "cause: RoPE pairs element i"),
    "no q/k norm": ("paper", [("qk_norm_rope", without_norm)], "q", "cause: q_norm is missing"),
    "YaRN not applied": ("yarn", [
        (qwen3, "rope_tables", lambda config, *a: rope_tables(replace(config, yarn=None), *a))], "q", "YaRN's factor"),
    "stale buffer": ("paper", [("publish", stale)], "attention", "the positions read"),
    "hasty trigger": ("paper", [(sfi, "Trigger", Hasty)], "reason", "theirs sentence, ours fast"),
    "log base": ("paper", [
        (selector, "evidence", lambda *a: evidence(*a) / math.log(2))], "log_evidence", "cause: log base 2"),
    "log base in the prior": ("paper", [(selector, "prior", lambda norms, lo, hi, c: prior(
        norms, lo, hi, replace(c, gamma=c.gamma / math.log(10), position_eta=c.position_eta / math.log(10),
                               theta=c.theta ** (1 / math.log(10)))))], "log_prior", "cause: log base 10"),
    "lambda cap for one row": ("one-row", [
        (selector, "mixing_weight", lambda f, r, rows, c: mixing_weight(f, r, rows + 1, c))], "lam",
        "cause: lambda cap"),
    "NMS window": ("paper", [(selector, "soft_nms", narrow_window)], "log_nms", "cause: NMS window even or odd"),
    "no tie-break in the spread": ("robust", [(selector, "spread", lambda *a: selector.window_max(*a).double())],
                                   "log_spread", "cause: the millionth of the own score is missing"),
    "softmax over all tokens": ("robust", [(selector, "evidence", lambda z, lo, hi, alpha: evidence(
        z, 0, z.shape[-1], alpha)[..., lo:hi].log_softmax(-1))], "log_evidence", "cause: softmax over all N tokens"),
    "oldest query first": ("robust", [(module, "evidence_logits", oldest_first) for module in (sfi, kernels)],
                           "evidence_logits", "cause: rows begin with the oldest query"),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_bug_is_named_at_its_stage(bug, dtype, tmp_path, monkeypatch):
    name, patches, stage, cause = BUGS[bug]
    golden, ops = GOLDENS[name], kernels.TORCH
    with monkeypatch.context() as m:
        for *where, what, by in patches:
            if where:
                m.setattr(*where, what, by)
            else:
                ops = replace(ops, **{what: by})
        record(tmp_path / "trace", golden, ops, dtype, new_tokens=8)
    report = check(tmp_path / "trace", golden)
    first = report.differences[0]
    assert first.stage == stage and cause in first.cause, report
    # The error stays where it was made: nothing that only follows from it is reported.
    related = {"attention": {"attention", "evidence_logits"}, "q": {"q", "k"}}
    assert set(stages(report)) <= related.get(stage, {stage}), report


def test_an_edge_off_by_one_is_named(tmp_path):
    golden, path = GOLDENS["paper"], tmp_path / "trace"
    record(path, replace(golden, knobs=dict(golden.knobs, recent=9)))
    tensors, meta = read(path)
    save_file(tensors, path, {**meta, "config": meta["config"].replace('"recent": 9', '"recent": 8')})
    report = check(path, golden)
    assert stages(report) == ["edge"] and report.differences[0].step == 0
    assert "cause: edge off by one" in report.differences[0].cause


@pytest.mark.parametrize("off, cause", [(1, "begins at edge + 1"), (-1, "begins at edge - 1")])
def test_a_fast_step_that_misreads_the_edge_is_named(off, cause, tmp_path):
    def attend(q, k, v, keys, values, compact_keys, compact_values, plan, *rest):
        plan = plan.clone()
        plan[:, 1] += off * (plan[:, 1] > 0)
        return kernels.attend_torch(q, k, v, keys, values, compact_keys, compact_values, plan, *rest)

    golden = GOLDENS["paper"]
    record(tmp_path / "trace", golden, replace(kernels.TORCH, attend=attend), new_tokens=4)
    report = check(tmp_path / "trace", golden)
    assert stages(report) == ["attention"] and cause in report.differences[0].cause, report


def test_a_tie_at_the_last_score_is_named(tmp_path, monkeypatch):
    golden, path = GOLDENS["robust"], tmp_path / "trace"
    with monkeypatch.context() as m:
        m.setattr(selector, "spread", lambda *a: selector.window_max(*a).double())
        m.setattr(selector, "top", threshold)
        record(path, golden)
    tensors, meta = read(path)
    save_file({name: t for name, t in tensors.items() if not name.endswith("log_spread")}, path, meta)
    report = check(path, golden)
    assert stages(report) == ["positions"] and "cause: tie at the K-th score" in report.differences[0].cause, report


@pytest.mark.parametrize("change, cause", [
    (lambda p: p - 4, "indices into the candidates"), (lambda p: p.flip(-1), "ascend"),
    (lambda p: torch.cat([p[:, :-1], torch.full_like(p[:, :1], 32)], -1), "edge off by one")])
def test_what_are_no_positions_of_candidates_is_said(change, cause, tmp_path):
    tensors, meta = read(TRACES / "paper.safetensors")
    name = trace.key(0, 0, 2, "positions")
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "trace", meta)
    first = check(tmp_path / "trace", GOLDENS["paper"]).differences[0]
    assert trace.key(0, first.step, first.layer, first.stage) == name and cause in first.cause


def test_a_wrong_token_is_found_without_any_tensor(tmp_path):
    tensors, meta = read(TRACES / "paper.safetensors")
    lists = {name: t for name, t in tensors.items() if ".step." not in name}
    lists["sequence.0.ids"][13] += 1
    save_file(lists, tmp_path / "trace", meta)
    first = check(tmp_path / "trace", GOLDENS["paper"]).differences[0]
    assert (first.stage, first.step, first.index) == ("ids", 13, [13])


# Files that cannot be compared

def knob(meta, change):
    config = json.loads(meta["config"])
    change(config)
    return {**meta, "config": json.dumps(config)}


Q = trace.key(0, 3, 1, "q")
BAD = {
    "another format": (lambda t, m: (t, {**m, "format": "2"}), "format '2', but this program reads '1'"),
    "another model": (lambda t, m: (t, {**m, "model": "0" * 64}), "another model: fingerprint 0000000000000000"),
    "another dtype": (lambda t, m: (t, {**m, "dtype": "int8"}), "dtype 'int8' is not one of"),
    "no metadata": (lambda t, m: (t, None), "metadata lacks 'format'"),
    "no config": (lambda t, m: (t, {n: v for n, v in m.items() if n != "config"}), "metadata lacks 'config'"),
    "config no JSON": (lambda t, m: (t, {**m, "config": "{"}), "no JSON object"),
    "config a list": (lambda t, m: (t, {**m, "config": "[1]"}), "no JSON object"),
    "a knob too few": (lambda t, m: (t, knob(m, lambda c: c.pop("sink"))), "lacks the knob 'sink'"),
    "a knob too many": (lambda t, m: (t, knob(m, lambda c: c["selector"].update(beta=1))), "unknown knob 'beta'"),
    "a wrong knob": (lambda t, m: (t, knob(m, lambda c: c.update(recent=-1))), "recent must be"),
    "no ids": (lambda t, m: ({n: v for n, v in t.items() if n != "sequence.0.ids"}, m), "sequence.0.ids is missing"),
    "no ends": (lambda t, m: ({n: v for n, v in t.items() if n != "ends"}, m), "ends is missing"),
    "a misspelt name": (lambda t, m: (t | {"sequence.0.step.3.layer.1.qs": t[Q].clone()}, m),
                        "not a name of this format"),
    "a layer too many": (lambda t, m: (t | {trace.key(0, 3, 3, "q"): t[Q].clone()}, m), "the model has 3 layers"),
    "a step too many": (lambda t, m: (t | {trace.key(0, 24, 1, "q"): t[Q].clone()}, m), "belongs to no stage"),
    "a selection at a fast step": (lambda t, m: (t | {trace.key(0, 3, 1, "lam"): torch.zeros(2)}, m), "belongs to no"),
    "not a number": (lambda t, m: (t | {Q: t[Q].index_fill(2, torch.tensor(5), math.nan)}, m), "q is nan at [0, 0, 5]"),
    "minus infinity": (lambda t, m: (t | {Q: t[Q] - math.inf}, m), "q is -inf at [0, 0, 0]"),
    "a wrong shape": (lambda t, m: (t | {Q: t[Q][0]}, m), "q has shape [4, 32], but should have [1, 4, 32]"),
    "a wrong type": (lambda t, m: (t | {Q: t[Q].int()}, m), "q has type torch.int32"),
    "a type without infinity": (lambda t, m: (t | {Q: t[Q].to(torch.float8_e4m3fn)}, m), "type torch.float8"),
    "complex ids": (lambda t, m: (t | {"sequence.0.ids": t["sequence.0.ids"].to(torch.complex64)}, m), "complex64"),
    "a prompt of truth values": (lambda t, m: (t | {"sequence.0.prompt": t["sequence.0.prompt"] > 9}, m), "torch.bool"),
    "config of pairs": (lambda t, m: (t, {**m, "config": "[[1, 2]]"}), "no JSON object"),
    "steps too few": (lambda t, m: (t | {"sequence.0.edge": t["sequence.0.edge"][1:]}, m), "should have shape [24]"),
    "reason unknown": (lambda t, m: (t | {"sequence.0.reason": t["sequence.0.reason"] + 4}, m), "reason is 6 at [6]"),
    "an id too large": (lambda t, m: (t | {"sequence.0.ids": t["sequence.0.ids"] + 512}, m),
                        "outside the vocabulary of 512"),
    "a prompt too large": (lambda t, m: (t | {"sequence.0.prompt": t["sequence.0.prompt"] + 512}, m),
                           "vocabulary of 512"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_refused_in_one_line(case, tmp_path):
    change, message = BAD[case]
    tensors, meta = change(*read(TRACES / "paper.safetensors"))
    save_file(tensors, tmp_path / "trace", meta)
    with pytest.raises(ValueError) as caught:
        check(tmp_path / "trace", GOLDENS["paper"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint32])
def test_positions_may_have_any_integer_type(dtype, tmp_path):
    tensors, meta = read(TRACES / "paper.safetensors")
    save_file({n: t.to(dtype) if n.endswith("positions") else t for n, t in tensors.items()}, tmp_path / "trace", meta)
    assert check(tmp_path / "trace", GOLDENS["paper"]).code == 0


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "trace"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        check(path, GOLDENS["paper"])
    whole = (TRACES / "paper.safetensors").read_bytes()
    for length in (0, 5, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            check(path, GOLDENS["paper"])


# Others' programs

def numpy_selector(z, norms, lo, hi, count, c):
    """The Selector from golden/README.md alone, by loops and numpy, in float64."""
    def normalised(x):
        top = x.max(-1, keepdims=True)
        return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))

    def highest(scores, reach):
        return np.array([[row[max(0, i - reach) : i + reach + 1].max() for i in range(len(row))] for row in scores])

    out, n = {}, hi - lo
    log_p = [[normalised(row[lo:hi]) for row in rows if np.isfinite(row[lo:hi]).any()] for rows in z.astype(np.float64)]
    with np.errstate(divide="ignore"):
        out["log_evidence"] = normalised(np.array([
            np.log(np.mean(np.exp(c["alpha"] * np.array(rows)), axis=0)) / c["alpha"] for rows in log_p]))
    x = np.arange(n) / max(n - 1, 1)
    beta = -np.log(c["theta"]) / c["p"]
    place = -beta * x ** c["position_power"] + c["position_eta"] * np.log(np.maximum(1 - x, c["eps"]))
    size = -c["gamma"] * np.log(np.maximum(norms[:, lo:hi].astype(np.float64), c["eps"]))
    out["log_prior"] = normalised(c["weight_norm"] * size + c["weight_position"] * place)
    f, r = np.exp(out["log_evidence"]), np.exp(out["log_prior"])
    cap = np.array([c["lambda_cap_single"] if len(rows) == 1 else c["lambda_cap_multi"] for rows in log_p])
    lam = out["lam"] = np.clip((f * (f - r)).sum(-1) / ((f - r) ** 2).sum(-1), 0, cap)
    out["log_fused"] = np.log((1 - lam[:, None]) * f + lam[:, None] * r)
    scores = out["log_fused"] - c["nms_alpha"] * (highest(out["log_fused"], c["nms_window"] // 2) - out["log_fused"])
    out["log_nms"] = scores
    share = np.exp(scores / c["exclusivity_temperature"])
    share = share / share.sum(0)
    scores = out["log_exclusive"] = scores + c["exclusivity_alpha"] * np.log(np.maximum(share, c["eps"]))
    if c["spread"]:
        scores = out["log_spread"] = highest(scores, c["spread"]) + 1e-6 * scores
    out["positions"] = np.sort(np.argsort(-scores, kind="stable")[:, : min(count, n)]) + lo
    return out


@pytest.mark.parametrize("name", ["paper", "paper-quality", "robust", "one-row", "all-selected"])
def test_a_selector_written_from_the_page_alone_verifies(name, tmp_path):
    tensors, meta = read(TRACES / f"{name}.safetensors")
    knobs = json.loads(meta["config"])
    port = {n: t for n, t in tensors.items() if ".step." not in n}
    for place in [n.removesuffix("key_norms") for n in tensors if n.endswith("key_norms")]:
        step = int(place.split(".")[3])
        length, edge = (int(tensors[f"sequence.0.{n}"][step]) for n in ("length", "edge"))
        z, norms = port[place + "evidence_logits"], port[place + "key_norms"] = (
            tensors[place + "evidence_logits"], tensors[place + "key_norms"])
        port |= {place + n: torch.from_numpy(value) for n, value in numpy_selector(
            z.numpy(), norms.numpy(), min(knobs["sink"], length), edge, knobs["selected"], knobs["selector"]).items()}
    save_file(port, tmp_path / "trace", meta)
    report = check(tmp_path / "trace", GOLDENS[name])
    assert report.code == 0 and report.stages["positions"].compared > 3, report


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32)] + [
    pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16)])
def test_the_kernels_verify_against_torch(device, dtype, tmp_path):
    if kernels.TRITON is None or (device == "cuda") != torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU, and if TRITON_INTERPRET is set; else the kernels")
    golden, ops = GOLDENS["robust"], kernels.TRITON
    if device == "cpu":                     # the interpreter is slow, and tests/test_kernels.py has these
        ops = replace(ops, linear=kernels.TORCH.linear, swiglu=kernels.TORCH.swiglu)
    model = qwen3.load(golden.folder, device, dtype, ops)
    config = replace(golden.config, refresh_interval=2, evidence_queries=2)
    trace.record(tmp_path / "trace", model, golden.folder, [list(range(2, 20))], config, 4, sentences=((), ()))
    report = check(tmp_path / "trace", golden)
    assert report.code == 0, report
    assert set(trace.DEPTHS["tensors"]) - report.stages.keys() == {"log_prior", "log_nms"}
