"""The promises of sfi.py: what each step reads, when a step is slow, and that SFI changes nothing it should not.

The models are the golden Qwen3 checkpoints: random, tiny, in fp32. tests/ holds the other chapters.
"""
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

import kernels
import model as qwen3
import sfi
from selector import SelectorConfig
from sfi import (FullMemory, Sampling, SFIConfig, SlowFastMemory, Stepper, Trigger, decode, generate, prefill,
                 read_prompts)

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS = sorted(path.name for path in (GOLDEN / "qwen3").iterdir())
SMALL = SFIConfig(sink=4, recent=8, selected=6, refresh_interval=7, min_gap=3)
ENDS, BLANK = frozenset(range(0, 512, 9)), frozenset(range(5, 512, 50))


@pytest.fixture(scope="module")
def tiny():
    return qwen3.load(GOLDEN / "qwen3" / "dense-tied", dtype=torch.float32)


def ids(count, seed=0):
    return torch.randint(2, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model, prompts, config, new=24, chunk=None, mode="sfi", **options):
    """generate, without stops and with made-up sentence tokens."""
    return generate(model, prompts, config, mode, new, stop_ids=(), sentences=(ENDS, BLANK), chunk=chunk, **options)


def trace(model, prompt, config, new=24, forced=None, poison=None, memory=None):
    """The logits [steps, V] and the memory of one sequence's run."""
    with torch.inference_mode():
        full = FullMemory(model, 1, len(prompt) + new, 16)
        logits = prefill(model, full, [prompt])
        used = SlowFastMemory(model, full, config) if memory is None else memory(full)
        if poison:
            poison(full, used)
        steps = list(t.logits[0].clone() for t in decode(model, used, logits, config, new, (ENDS, BLANK), (),
                                                         forced=forced and [forced]))
    return torch.stack(steps), used


# Full KV against Hugging Face

@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("mode, config", [("full", SFIConfig()), ("sfi", SFIConfig(policy="always"))])
def test_dense_decoding_gives_the_golden_greedy_ids(name, mode, config):
    model = qwen3.load(GOLDEN / "qwen3" / name, dtype=torch.float32)
    expected = load_file(GOLDEN / "qwen3" / name / "expected.safetensors")
    wanted = expected["greedy_ids"].flatten().tolist()
    prompt = expected["input_ids"].flatten().tolist()
    assert generate(model, prompt, config, mode, len(wanted), stop_ids=()).ids == wanted


# Exactness

def test_fast_steps_equal_dense_ones_while_all_candidates_fit(tiny):
    prompt, config = ids(40), replace(SMALL, selected=100, policy="never")
    dense, _ = trace(tiny, prompt, replace(config, policy="always"))
    fast, memory = trace(tiny, prompt, config)
    assert memory.counts == [40 - 4 - 8]
    torch.testing.assert_close(fast, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("total", [SMALL.sink + SMALL.recent + d for d in (-1, 0, 1)])
def test_prompts_at_the_window_s_edge(tiny, total):
    dense, _ = trace(tiny, ids(total), replace(SMALL, policy="always"), new=6)
    sparse, memory = trace(tiny, ids(total), replace(SMALL, policy="never"), new=6)
    assert memory.counts == [max(0, total - 12)]
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-5)


def test_always_equals_full(tiny):
    prompt = ids(50)
    full, _ = trace(tiny, prompt, replace(SMALL, policy="always"), memory=lambda full: full)
    always, _ = trace(tiny, prompt, replace(SMALL, policy="always"))
    assert torch.equal(full, always)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_split_of_the_prompt_gives_the_same_run(tiny, chunk):
    prompt = ids(64)
    whole, split = (run(tiny, prompt, SMALL, chunk=c) for c in (None, chunk))
    assert (whole.ids, [s.kind for s in whole.steps]) == (split.ids, [s.kind for s in split.steps])
    memories = []
    for c in (None, chunk):
        with torch.inference_mode():
            full = FullMemory(tiny, 1, 70, 16)
            prefill(tiny, full, [prompt], c)
            memory = SlowFastMemory(tiny, full, SMALL)
            memory.start()
            memories.append(memory)
    assert torch.equal(memories[0].positions, memories[1].positions)
    for layer in range(3):
        assert memories[1].reads(layer, 0, 65)[0, :4].tolist() == [0, 1, 2, 3]


def test_cached_decoding_equals_the_uncached_forward(tiny):
    prompt = ids(30)
    logits, _ = trace(tiny, prompt, replace(SMALL, policy="always"), new=10, forced=ids(10, 1))
    whole = tiny.logits(torch.tensor(prompt + ids(10, 1)))
    torch.testing.assert_close(logits, whole[29:39], rtol=0, atol=1e-4)


def test_what_a_fast_step_does_not_read_changes_nothing(tiny):
    prompt, forced = ids(60), ids(5, 1)
    config = replace(SMALL, policy="never", selected=6)
    clean, memory = trace(tiny, prompt, config, 5, forced)

    def poison(full, used):
        used.start()
        for layer in range(3):
            for head in range(2):
                unread = torch.ones(60, dtype=torch.bool)
                unread[used.reads(layer, 0, 60)[head]] = False
                # Sink and selected tokens are read from the compact buffer alone.
                unread[: used.edges[0]] = True
                for x in (full.keys, full.values):
                    x[layer, 0, head, :60][unread] = float("nan")
                    x[layer, 0, head, 60:] = float("nan")
        used.compact_keys[..., used.firsts[0] + used.counts[0] :, :] = float("nan")
        used.start = lambda: None                       # the bootstrap has been made: not again from poisoned keys

    poisoned, _ = trace(tiny, prompt, config, 5, forced, poison)
    assert torch.equal(clean, poisoned)


def test_a_slot_used_again_by_a_shorter_prompt_is_as_new(tiny):
    long, short = ids(80), ids(30, 1)
    with torch.inference_mode():
        full = FullMemory(tiny, 1, 120, 16)
        for prompt in (long, short):
            full.rewind([0])
            logits = prefill(tiny, full, [prompt])
            memory = SlowFastMemory(tiny, full, SMALL)
            written = [t.ids[0] for t in decode(tiny, memory, logits, SMALL, 20, (ENDS, BLANK))]
    assert written == run(tiny, short, SMALL, 20).ids


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, evidence_queries=5, selector=SelectorConfig(spread=2)),
                                    replace(SMALL, doubt=0.3)], ids=["paper", "window", "doubt"])
def test_alone_and_in_a_batch_the_same_tokens_come_out(tiny, config):
    prompts = [ids(2), ids(9, 1), ids(70, 2)]
    together = run(tiny, prompts, config, 30)
    for prompt, batched in zip(prompts, together):
        alone = run(tiny, prompt, config, 30)
        assert alone.ids == batched.ids
        assert [(s.kind, s.reason, s.read) for s in alone.steps] == [(s.kind, s.reason, s.read) for s in batched.steps]


def test_a_sequence_that_ends_leaves_the_others_alone(tiny):
    prompts = [ids(20), ids(33, 1)]
    free = run(tiny, prompts, SMALL, 12)
    stop = next(id for id in free[0].ids[1:] if id not in free[1].ids)
    stopped = generate(tiny, prompts, SMALL, "sfi", 12, stop_ids={stop}, sentences=(ENDS, BLANK))
    assert stopped[0].ids == free[0].ids[: free[0].ids.index(stop) + 1] and stopped[1].ids == free[1].ids


# What is read

@settings(max_examples=25, deadline=None)
@given(sink=st.integers(0, 6), recent=st.integers(0, 12), selected=st.integers(0, 30), length=st.integers(1, 40),
       steps=st.integers(1, 9), queries=st.integers(1, 4))
def test_a_fast_step_reads_no_position_twice_and_leaves_no_hole(tiny, sink, recent, selected, length, steps, queries):
    config = SFIConfig(sink=sink, recent=recent, selected=selected, policy="never", evidence_queries=queries)
    _, memory = trace(tiny, ids(length), config, steps)
    n = length + steps - 1
    first, edge = min(sink, length), max(min(sink, length), length - recent)
    for layer in range(3):
        for read in memory.reads(layer, 0, n).tolist():
            chosen = read[first : len(read) - (n - edge)]
            assert read == sorted(set(read)) \
                and read[:first] == list(range(first)) and read[len(read) - (n - edge):] == \
                list(range(edge, n)) and len(chosen) == min(selected, edge - first)
            assert all(first <= position < edge for position in chosen)


def test_the_compact_buffer_holds_what_the_positions_say(tiny):
    _, memory = trace(tiny, ids(60), SMALL)
    count = memory.firsts[0] + memory.counts[0]
    for layer in range(3):
        read = memory.reads(layer, 0, memory.lengths[0])[:, :count]
        for head in range(2):
            for full, compact in ((memory.full.keys, memory.compact_keys), (memory.full.values, memory.compact_values)):
                assert torch.equal(compact[layer, 0, head, :count], full[layer, 0, head, read[head]])


def test_every_layer_s_selection_comes_from_the_same_slow_step(tiny):
    seen = []

    def publish(logits, lse, norms, keys, values, plan, *rest):
        seen.append(plan[0, 2].item())
        kernels.publish_torch(logits, lse, norms, keys, values, plan, *rest)

    tiny.ops = replace(kernels.TORCH, publish=publish)
    try:
        steps = run(tiny, ids(60), SMALL).steps
    finally:
        tiny.ops = kernels.TORCH
    assert seen == [s.length for s in steps if s.kind == "slow" for _ in range(3)]


def test_the_evidence_window_is_the_last_queries_each_over_its_own_past(tiny):
    config = replace(SMALL, evidence_queries=4, recent=0, policy="interval", refresh_interval=2)
    recorded, queries = [], {}

    def attend(q, k, v, keys, *rest):
        plan, evidence = rest[3], rest[8:]
        out = kernels.attend_torch(q, k, v, keys, *rest)
        if keys.data_ptr() == memory.full.keys[1].data_ptr():               # layer 1
            end = plan[0, 2].item()
            queries[end - 1] = q[0].clone()
            if evidence:
                recorded.append((end, evidence[0][0, :, :, :end].clone(), keys[0, :, :end].clone()))
        return out

    prompt = ids(20)
    with torch.inference_mode():
        full = FullMemory(tiny, 1, 40, 16)
        logits = prefill(tiny, full, [prompt])
        memory = SlowFastMemory(tiny, full, config)
        full.ops = replace(kernels.TORCH, attend=attend)
        list(decode(tiny, memory, logits, config, 9, (ENDS, BLANK)))
    end, z, keys = recorded[-1]
    for w in range(4):
        own = end - 1 - w
        query = queries[own].unflatten(0, (2, -1))                          # [G, H/G, D]
        row = z[:, 2 * w : 2 * w + 2]
        torch.testing.assert_close(row[..., : own + 1], query @ keys[:, : own + 1].mT * full.scale)
        assert (row[..., own + 1 :] == float("-inf")).all()


# When a step is slow

def reasons(tokens, config, ends=(13,), blank=(220,)):
    trigger = Trigger(config, frozenset(ends), frozenset(blank))
    return [trigger(step, token) for step, token in enumerate(tokens, 1)]


WORD, STOP, SPACE = 50, 13, 220


@pytest.mark.parametrize("tokens, config, expected", [
    # The first token that neither ends a sentence nor is white space fires.
    ([WORD, STOP, WORD, WORD], SFIConfig(min_gap=0), [None, None, "sentence", None]),
    ([STOP, SPACE, STOP, SPACE, WORD], SFIConfig(min_gap=0), [None] * 4 + ["sentence"]),
    # A start too soon after the last slow step is dropped, not put off.
    ([STOP, WORD, WORD, WORD, WORD], SFIConfig(min_gap=3), [None] * 5),
    ([WORD, STOP, WORD, WORD], SFIConfig(min_gap=3), [None, None, "sentence", None]),
    ([WORD, WORD, STOP, WORD, STOP, WORD, STOP, WORD], SFIConfig(min_gap=4),
     [None, None, None, "sentence", None, None, None, "sentence"]),
    # The interval counts from the last slow step, whatever its reason.
    ([WORD] * 7, SFIConfig(refresh_interval=3), [None, None, "interval", None, None, "interval", None]),
    ([WORD, STOP, WORD, WORD, WORD, WORD], SFIConfig(refresh_interval=3, min_gap=2),
     [None, None, "sentence", None, None, "interval"]),
    ([STOP, WORD] * 2, SFIConfig(refresh_interval=2, min_gap=0), [None, "sentence", None, "sentence"]),
    ([WORD] * 3, SFIConfig(refresh_interval=0), ["interval"] * 3),
    ([STOP, WORD] * 3, SFIConfig(policy="interval", refresh_interval=4, min_gap=0),
     [None] * 3 + ["interval", None, None]),
    ([STOP, WORD] * 2, SFIConfig(policy="never", min_gap=0, refresh_interval=1), [None] * 4),
    ([WORD] * 2, SFIConfig(policy="always"), ["always"] * 2),
])
def test_trigger(tokens, config, expected):
    assert reasons(tokens, config) == expected


def test_token_id_zero_ends_a_sentence_like_any_other():
    assert reasons([0, WORD], SFIConfig(min_gap=0), ends=(0,)) == [None, "sentence"]


def test_step_zero_is_the_end_of_prefill_and_slow(tiny):
    steps = run(tiny, ids(30), replace(SMALL, policy="interval", refresh_interval=5), 12).steps
    assert (steps[0].kind, steps[0].reason, len(steps)) == ("slow", "prefill", 12)
    assert [i for i, s in enumerate(steps) if s.kind == "slow"] == [0, 5, 10]


def test_the_tokens_counted_as_read_are_those_in_the_plan(tiny):
    steps = run(tiny, ids(60), replace(SMALL, policy="interval", refresh_interval=5), 12).steps
    assert [s.read for s in steps[:7]] == [60] + [4 + 6 + 8 + age for age in (1, 2, 3, 4)] + [65, 4 + 6 + 8 + 1]
    assert [s.length for s in steps[:3]] == [60, 61, 62]


# Doubt

def test_a_step_done_again_says_what_a_slow_step_there_would_have_said(tiny):
    prompt, forced = ids(60), ids(10, 1)
    base = replace(SMALL, policy="never")
    doubting = replace(base, doubt=1.0, doubt_gap=4)                        # any probability below 1 is in doubt
    steps = run(tiny, prompt, doubting, 10, forced=forced).steps
    assert [i for i, s in enumerate(steps) if s.kind == "slow"] == [0, 1, 5, 9]
    assert [(s.reason, s.read) for s in steps[1:3]] == [("doubt", (4 + 6 + 8 + 1) + 61), (None, 4 + 6 + 8 + 1)]
    never, with_doubt, interval = (trace(tiny, prompt, config, 10, forced)[0] for config in (
        base, doubting, replace(base, policy="interval", refresh_interval=1)))
    assert torch.equal(with_doubt[1], interval[1]) and not torch.equal(with_doubt[1], never[1])
    assert not torch.equal(with_doubt[2], never[2])                         # the selection is new too


def test_doubt_zero_is_off(tiny):
    assert run(tiny, ids(60), SMALL).ids == run(tiny, ids(60), replace(SMALL, doubt=0.0)).ids


# Sampling, capacity, configuration

def test_the_same_seed_writes_the_same_text_and_temperature_zero_is_greedy(tiny):
    warm = Sampling(temperature=1.5, seed=3)
    assert run(tiny, ids(20), SMALL, sampling=warm).ids == run(tiny, ids(20), SMALL, sampling=warm).ids
    assert run(tiny, ids(20), SMALL, sampling=replace(warm, seed=4)).ids != run(tiny, ids(20), SMALL, sampling=warm).ids
    assert run(tiny, ids(20), SMALL, sampling=Sampling(temperature=0.0, seed=3)).ids == run(tiny, ids(20), SMALL).ids
    assert run(tiny, ids(20), SMALL, sampling=Sampling(temperature=2.0, top_k=1)).ids == run(tiny, ids(20), SMALL).ids


def test_top_p_is_a_share_of_what_top_k_has_left():
    logits = torch.tensor([0.4, 0.3, 0.3]).log()                            # after top-k 4/7 and 3/7
    for top_p, drawn in ((0.5, {0}), (0.6, {0, 1})):
        assert {sfi.sample(logits, Sampling(1.0, 2, top_p), torch.Generator().manual_seed(seed))
                for seed in range(40)} == drawn


@settings(max_examples=50, deadline=None)
@given(logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12), top_k=st.integers(0, 20), top_p=st.floats(0.01, 1),
       min_p=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_sampled_token_passes_every_filter(logits, top_k, top_p, min_p, seed):
    logits = torch.tensor(logits)
    token = sfi.sample(logits, Sampling(1.0, top_k, top_p, min_p), torch.Generator().manual_seed(seed))
    p = logits.double().softmax(-1)
    better, left = p[p > p[token]], p.sort(descending=True).values[: top_k or None].sum()
    assert p[token] >= min_p * p.max() - 1e-12 and better.sum() < left * top_p + 1e-12
    assert not top_k or len(better) < top_k


@pytest.mark.parametrize("knobs", [
    dict(sink=-1), dict(recent=1.5), dict(selected=None), dict(evidence_queries=0), dict(bootstrap_queries=0),
    dict(policy="often"), dict(doubt=float("nan")), dict(doubt=1.5), dict(min_gap=True), dict(refresh_interval=-1),
    dict(doubt="x"), dict(doubt=True), dict(selector=None), dict(evidence_queries=2**21)])
def test_a_bad_knob_is_refused_by_name(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        SFIConfig(**knobs)


@pytest.mark.parametrize("knobs", [dict(temperature="a"), dict(temperature=1e-320), dict(top_k=1.5), dict(seed=1.5)])
def test_a_bad_sampling_knob_is_refused_by_name(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        Sampling(**knobs)


def test_a_huge_sink_reads_everything(tiny):
    assert run(tiny, ids(20), replace(SMALL, sink=10**12)).ids == run(tiny, ids(20), SMALL, mode="full").ids


def test_windows_longer_than_the_sequence_see_all_of_it_and_cost_no_more(tiny):
    whole, huge = (replace(SMALL, evidence_queries=n, bootstrap_queries=n) for n in (44, 2**20))
    assert run(tiny, [ids(20)], huge)[0].ids == run(tiny, [ids(20)], whole)[0].ids
    full, logits, _ = read_prompts(tiny, [ids(20)], huge, 24)
    memory = SlowFastMemory(tiny, full, huge)
    assert memory.ring.shape[2] <= 44 + 63 and memory.rows == 64 * 2


def test_logits_that_are_not_finite_are_refused():
    model = qwen3.load(GOLDEN / "qwen3" / "dense-tied", dtype=torch.float32)
    model.norm[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        generate(model, [3], SMALL)


def test_presets():
    assert SFIConfig.preset("paper") == SFIConfig()
    robust = SFIConfig.preset("robust", sink=2, gamma=0.1)
    assert (robust.evidence_queries, robust.selector.alpha, robust.selector.spread) == (8, 2.0, 8)
    assert (robust.sink, robust.selector.gamma) == (2, 0.1)
    doubt = SFIConfig.preset("robust-doubt")
    assert replace(doubt, recent=256, doubt=0.0, doubt_gap=4) == SFIConfig.preset("robust")
    assert (doubt.recent, doubt.doubt, doubt.doubt_gap) == (128, 0.99997, 1)
    quality = SFIConfig.preset("paper-quality")
    assert (quality.selected, quality.refresh_interval, quality.min_gap) == (4096, 32, 16)
    assert (quality.selector.lambda_cap_single, quality.selector.lambda_cap_multi) == (0.01, 0.01)
    assert (quality.selector.nms_alpha, quality.selector.exclusivity_alpha) == (0.5, 0.35)
    for name, knobs in (("best", {}), ("paper", {"beta": 1})):
        with pytest.raises(ValueError, match="best|beta"):
            SFIConfig.preset(name, **knobs)


@pytest.mark.parametrize("prompt, new, message", [
    ([], 5, "empty"), ([[3], []], 5, "empty"), ([512], 5, "512"), ([-1], 5, "-1"), ([3], 0, "max_new_tokens"),
    ([3] * 500, 13, "500 prompt tokens and 13 new")])
def test_a_run_that_cannot_fit_is_refused_before_prefill(tiny, prompt, new, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny, prompt, SMALL, max_new_tokens=new)


@pytest.mark.parametrize("options", [
    dict(forced=[[1, 2]]), dict(forced=[[1, 2], [1, 2], [1, 2]]), dict(forced=[1, 2]), dict(forced=[[1, 2], [1]]),
    dict(forced=[[1, 2], [1, 512]]), dict(forced=[[-1, 2], [1, 2]]), dict(forced=[["a", 2], [1, 2]]), dict(forced=7),
    dict(chunk=0), dict(chunk=-1), dict(chunk=2.0), dict(chunk=True), dict(max_new_tokens=True),
    dict(max_new_tokens=2.0), dict(max_new_tokens="2"), dict(max_new_tokens=None), dict(prompt_ids="ab"),
    dict(prompt_ids=["ab", "c"]), dict(prompt_ids=[1.5]), dict(prompt_ids=[[3], 4]), dict(prompt_ids=7)])
def test_a_bad_argument_is_refused_by_name_before_any_compute(tiny, options, monkeypatch):
    monkeypatch.setattr(tiny, "forward", None)
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        generate(tiny, **dict(prompt_ids=[[3], [4]], config=SMALL, max_new_tokens=2) | options)


def test_an_unknown_mode_is_refused(tiny):
    with pytest.raises(ValueError, match="half"):
        generate(tiny, [3], SMALL, mode="half")
