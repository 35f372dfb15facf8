"""The promises of the GPU path that only a real card can keep: `pytest -m gpu`, in a few minutes.

The Triton path beside the torch path on the shipped checkpoint, captured graphs beside eager steps, overlap on and off,
long contexts, memory. Each kernel alone: tests/test_kernels.py.
Caches are filled with NaN before they are used: whatever is read too early, or beside its range, shows.
"""
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernels
import model as qwen3
from selector import select
from sfi import (FullMemory, SFIConfig, SlowFastMemory, Step, Stepper, decode, generate, prefill, read_prompts,
                 sentence_tokens)

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "8k.txt"
SMALL = qwen3.Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                     num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=140000,
                     rope_theta=1e6, tie_word_embeddings=True)              # Qwen3-0.6B

knobs = dict(recent=64, selected=128, refresh_interval=24, min_gap=8)
PAPER, ROBUST = SFIConfig.preset("paper", **knobs), SFIConfig.preset("robust", **knobs)
both_presets = pytest.mark.parametrize("config", [PAPER, ROBUST], ids=["paper", "robust"])


def build(dtype, ops=None):
    """The shipped checkpoint."""
    return qwen3.load(ROOT / "tiny", DEVICE, dtype, ops)


def text(model, count, start=0):
    """`count` token ids of an example."""
    return model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[start : start + count]


@torch.inference_mode()
def read(model, prompts, room):
    """A prefilled FullMemory with space for `room` more tokens, NaN wherever nothing was stored -> memory, logits."""
    full = FullMemory(model, len(prompts), max(map(len, prompts)) + room, 16)
    for x in (full.keys, full.values, full.key_norms, full.ring):
        x.fill_(float("nan"))
    return full, prefill(model, full, prompts)


@dataclass
class Trace:
    """What a run did: token ids and step kinds by step and sequence, logits [steps, B, V], selections per slow step."""
    memory: object
    ids: list = field(default_factory=list)
    kinds: list = field(default_factory=list)
    reads: list = field(default_factory=list)
    logits: list = field(default_factory=list)
    selections: list = field(default_factory=list)


@torch.inference_mode()
def trace(model, full, logits, config, new, forced=None, capture=None, **options):
    """Decode `new` tokens from a prefilled memory, which is put back to its prompts after; config None: full KV."""
    lengths = list(full.lengths)
    memory = full
    if config:
        memory = SlowFastMemory(model, full, config, **options)
        for x in (memory.compact_keys, memory.compact_values, memory.logits, memory.lse):
            x.fill_(float("nan"))
    result = Trace(memory)
    stepper = Stepper(model, memory, capture)
    for token in decode(model, memory, logits, config or SFIConfig(policy="always"), new, sentence_tokens(model), (),
                        forced=forced, stepper=stepper):
        result.ids.append(token.ids)
        result.kinds.append([(r.kind, r.reason) for r in token.records])
        result.reads.append([(r.read, r.length) for r in token.records])
        result.logits.append(token.logits.clone())
        if config and any(r.kind == "slow" for r in token.records):
            result.selections.append(memory.positions.clone())
    full.rewind(lengths)
    result.logits = torch.stack(result.logits)
    assert result.logits.isfinite().all(), "a logit is not finite"
    return result


def error(x, exact):
    """||x - exact|| / ||exact||."""
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


# The Triton path beside the torch path

@both_presets
def test_triton_selects_decides_and_writes_like_torch_in_fp32(config):
    scores = []                                             # of every layer in every slow step, in order

    def publish(logits, lse, norms, keys, values, plan, sink, recent, selector, positions, *compact):
        end = plan[0, 2].item()
        scores.extend(select(z[..., :end], norm[..., :end], sink, end - recent, positions.shape[-1],
                             selector).log_spread
                      for z, norm in zip(logits[:, 0], norms[:, 0]))
        kernels.publish_torch(logits, lse, norms, keys, values, plan, sink, recent, selector, positions, *compact)

    model = build(torch.float32, replace(kernels.TORCH, publish=publish))
    expected = trace(model, *read(model, [text(model, 2000)], 200), config, 200, capture=False)
    model = build(torch.float32)
    got = trace(model, *read(model, [text(model, 2000)], 200), config, 200)
    assert got.ids == expected.ids and got.kinds == expected.kinds and got.reads == expected.reads
    layers, differing, worst = model.config.num_hidden_layers, 0, 0.0
    for step, (a, b) in enumerate(zip(expected.selections, got.selections, strict=True)):
        for layer in range(layers):
            for head, (ours, theirs) in enumerate(zip(a[layer, 0].tolist(), b[layer, 0].tolist())):
                score = scores[step * layers + layer][head]                 # over the candidates
                least = score.topk(len(ours)).values[-1]
                for position in set(ours) ^ set(theirs):                   # only what ties with the last one may differ
                    differing += 1
                    worst = max(worst, (score[position - config.sink] - least).abs().item())
    total = sum(x.numel() for x in expected.selections)
    assert worst < 1e-2 and differing < 0.005 * total, f"{differing} of {total} positions differ, scores by {worst}"


def test_bf16_is_no_further_from_fp32_than_torch_s_own_bf16():
    exact_model = build(torch.float32, kernels.TORCH)
    prompt = [text(exact_model, 1500)]
    for config, slack in ((None, 1.25), (PAPER, 1.5)):      # with SFI, selections made from bf16 scores differ too
        full, logits = read(exact_model, prompt, 100)
        exact = trace(exact_model, full, logits, config, 100, capture=False)
        forced = [[row[0] for row in exact.ids]]
        errors = []
        for ops, capture in ((kernels.TORCH, False), (None, None)):
            model = build(torch.bfloat16, ops)
            run = trace(model, *read(model, prompt, 100), config, 100, forced, capture)
            errors.append(error(run.logits, exact.logits))
        assert errors[1] <= slack * errors[0] < 0.5, f"config {config}: error of torch and Triton in bf16 {errors}"


# What must not be visible: graphs, overlap, groups, the rest of the batch

@both_presets
def test_graphs_overlap_and_groups_change_no_bit(config):
    model = build(torch.bfloat16)
    full, logits = read(model, [text(model, 1500), text(model, 700, 50)], 120)
    reference = trace(model, full, logits, config, 120, capture=False, overlap=False, group=1)
    assert len(reference.selections) > 4
    for capture, overlap, group in ((False, True, 1), (False, True, 7), (True, False, 1), (True, False, 7),
                                    (True, True, 1), (True, True, 3), (True, True, 7), (True, True, 7)):
        run = trace(model, full, logits, config, 120, capture=capture, overlap=overlap, group=group)
        how = f"capture {capture}, overlap {overlap}, group {group}"
        assert run.ids == reference.ids and run.kinds == reference.kinds, how
        assert torch.equal(run.logits, reference.logits), f"{how}: {error(run.logits, reference.logits)}"
        for a, b in zip(run.selections, reference.selections, strict=True):
            assert torch.equal(a, b), f"{how}: {(a != b).sum().item()} of {a.numel()} positions differ"


@torch.inference_mode()
def test_the_selector_never_runs_on_the_stream_that_is_captured(monkeypatch):
    """torch hands out streams in turn, from a pool of 32: the side stream must not become the layers' own."""
    shared, publish = [], SlowFastMemory.publish

    def watch(memory, *arguments):
        shared.append(memory.stream == torch.cuda.current_stream())
        publish(memory, *arguments)

    monkeypatch.setattr(SlowFastMemory, "publish", watch)
    model = build(torch.bfloat16)
    full, _ = read(model, [text(model, 100)], 1)
    for _ in range(33):
        Stepper(model, SlowFastMemory(model, full, PAPER))
    assert len(shared) >= 33 and not any(shared)


@both_presets
def test_a_batch_of_unequal_lengths_writes_what_each_writes_alone(config):
    model = build(torch.float32)
    prompts = [text(model, count, start) for count, start in ((3, 0), (300, 20), (1500, 40))]
    together = trace(model, *read(model, prompts, 100), config, 100)
    for b, prompt in enumerate(prompts):
        alone = trace(model, *read(model, [prompt], 100), config, 100)
        for name in ("ids", "kinds", "reads"):
            ours, theirs = getattr(together, name), getattr(alone, name)
            assert [step[b] for step in ours] == [step[0] for step in theirs], (name, b)


@torch.inference_mode()
def test_a_fast_row_beside_a_slow_one_reads_its_own_segments_alone():
    model = build(torch.float32)
    full, _ = read(model, [text(model, 700), text(model, 900, 50)], 8)
    memory = SlowFastMemory(model, full, PAPER)
    memory.start()
    stepper = Stepper(model, memory)
    memory.start()                                          # capturing has run a slow step
    full.lengths[:] = [n + 1 for n in full.lengths]
    tokens = [7, 9]

    def state(row):
        return [x[:, row].clone() for x in (memory.positions, memory.compact_keys, memory.compact_values)]

    fast = stepper(tokens, memory.plan([False, False])).clone()
    before, edge = state(1), memory.edges[1]
    kept = [x[:, 1].clone() for x in (full.keys, full.values)]
    full.keys[:, 1, :, :edge] = full.values[:, 1, :, :edge] = float("nan")
    mixed = stepper(tokens, memory.plan([True, False])).clone()
    selected = memory.positions[:, 0].clone()
    assert error(mixed[1], fast[1]) < 1e-4, error(mixed[1], fast[1])
    assert all(torch.equal(a, b) for a, b in zip(state(1), before)), "a fast row's selection has changed"
    full.keys[:, 1], full.values[:, 1] = kept
    slow = stepper(tokens, memory.plan([True, True]))
    assert error(mixed[0], slow[0]) < 1e-4, error(mixed[0], slow[0])
    differing = (memory.positions[:, 0] != selected).float().mean().item()
    assert differing < 0.01, f"{differing} of the slow row's positions depend on the other row"


@pytest.mark.parametrize("config", [None, PAPER], ids=["full", "sfi"])
@torch.inference_mode()
def test_2000_tokens_lie_where_a_fresh_prefill_puts_them(config):
    model = build(torch.float32)
    prompt, new = text(model, 300), 2001
    written = torch.randint(1, model.config.vocab_size, (new,), generator=torch.Generator().manual_seed(1)).tolist()
    full, logits = read(model, [prompt], new)
    run = trace(model, full, logits, config, new, forced=[written])
    assert [step[0][1] for step in run.reads] == list(range(300, 300 + new))
    fresh, _ = read(model, [prompt + written[:-1]], 0)
    n = 300 + new - 1
    layers = 1 if config else model.config.num_hidden_layers                # deeper ones see what SFI leaves out
    for name in ("keys", "values", "key_norms"):
        ours, theirs = (getattr(x, name)[:layers, 0, :, :n] for x in (full, fresh))
        ours, theirs = ours.reshape(layers, ours.shape[1], n, -1), theirs.reshape(layers, ours.shape[1], n, -1)
        off = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).amax((0, 1))     # [n]
        assert off.max() < 1e-3, f"{name}: position {off.argmax().item()} is off by {off.max().item()}, 0 by {off[0]}"


# Long contexts

def dense(q, keys, values, positions=None):
    """Attention in float64: q [H, D], keys and values [G, N, D], positions [G, n] or None for all -> [H, D]."""
    out = []
    for g, query in enumerate(q.double().unflatten(0, (keys.shape[0], -1))):
        at = slice(None) if positions is None else positions[g]
        p = (query @ keys[g, at].double().T * q.shape[-1] ** -0.5).softmax(-1)
        out.append(p @ values[g, at].double())
    return torch.cat(out)


def card_with(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free memory")


@torch.inference_mode()
def test_a_layer_of_more_than_2_to_31_elements():
    card_with(12)
    B, H, G, D, C = 17, 16, 8, 128, 131072
    place = dict(device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.empty(B, G, C, D, **place) for _ in range(2))
    assert keys.numel() > 2**31
    for x in (keys[-1], values[-1]):
        x.normal_()
    q, k, v = (torch.randn(B, heads, D, **place) for heads in (H, G, G))
    plan = torch.tensor([(0, 0, 1, 0)] * (B - 1) + [(0, 0, C, 0)], dtype=torch.int32, device=DEVICE)
    out = kernels.TRITON.attend(q, k, v, keys, values, None, None, plan, D ** -0.5, torch.empty(B, G, C, device=DEVICE))
    assert torch.equal(keys[-1, :, -1], k[-1]) and torch.equal(values[-1, :, -1], v[-1])
    off = error(out[-1], dense(q[-1], keys[-1], values[-1]))
    assert off < 1e-2, off
    assert torch.equal(out[0], v[0].repeat_interleave(H // G, 0))           # one token alone


@torch.inference_mode()
def test_evidence_rows_that_lie_more_than_2_to_31_elements_apart():
    card_with(12)
    G, R, C, stride = 2, 4, 1000, 2**30
    store = torch.empty(R * stride, dtype=torch.bfloat16, device=DEVICE)
    apart = store.as_strided((1, 1, G, R, C), (1, 1, C, stride, 1)).copy_(torch.randn(1, 1, G, R, C))
    norms, plan = torch.ones(1, 1, G, C, device=DEVICE), torch.tensor([(0, 0, C, 1)], dtype=torch.int32, device=DEVICE)
    near, far = (kernels.scores_triton(z, z.float().logsumexp(-1), norms, plan, 0, 0, SFIConfig().selector)
                 for z in (apart.contiguous(), apart))
    assert torch.equal(near.log_spread, far.log_spread)


@both_presets
@torch.inference_mode()
def test_slow_and_fast_steps_at_128k(config):
    """The last group of layers of a Qwen3-0.6B memory of four sequences, whose cache has well over 2^31 elements."""
    card_with(75)
    config = replace(config, recent=256, selected=2048)
    model = SimpleNamespace(config=SMALL, device=torch.device(DEVICE), dtype=torch.bfloat16, ops=kernels.TRITON)
    B, N, layers = 4, 131072, range(21, 28)
    full = FullMemory(model, B, N + 1, 16)
    for x in (full.keys, full.values, full.ring):
        for layer in layers:
            x[layer].normal_()
    for layer in layers:
        full.key_norms[layer] = full.keys[layer].norm(dim=-1)
    full.lengths[:] = [N, N - 1, N - 1000, N]
    memory = SlowFastMemory(model, full, config, group=7)

    def step(slow):
        rows = memory.plan([slow] * B)
        plan = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        for layer in layers:
            q, k, v = (torch.randn(B, 1, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (16, 8, 8))
            out = memory.attend(layer, q, k, v, Step(plan[:, 2:3].long() - 1, plan, slow))
        memory.join()
        torch.cuda.synchronize()
        memory.finish(rows)
        return q[-1, 0], out[-1, 0]

    q, out = step(True)
    keys, values = full.keys[27, -1], full.values[27, -1]                   # [G, C, D]
    off = error(out, dense(q, keys[:, :N], values[:, :N]))
    assert off < 1e-2, f"slow step: {off}"
    z = memory.logits[27 // 7 % 2, 27 % 7, -1, :, :, :N]
    chosen = select(z, full.key_norms[27, -1, :, :N], config.sink, N - config.recent, config.selected, config.selector)
    worst = 0.0
    for g in range(8):
        score, mine = chosen.log_spread[g], memory.positions[27, -1, g]
        least = score.topk(config.selected).values[-1]
        assert (mine.diff() > 0).all()
        worst = max(worst, (least - score[mine - config.sink].min()).item())
        for source, compact in ((keys, memory.compact_keys), (values, memory.compact_values)):
            assert torch.equal(compact[27, -1, g, config.sink :], source[g, mine]), f"head {g}: gathered from elsewhere"
    assert worst < 1e-3, f"a selected token scores {worst} less than one that was not"
    full.lengths[:] = [n + 1 for n in full.lengths]
    q, out = step(False)
    off = error(out, dense(q, keys, values, memory.reads(27, B - 1, N + 1)))
    assert off < 1e-2, f"fast step: {off}"


# Memory

def test_peak_memory_is_weights_caches_and_the_stated_scratch():
    """Scratch: prefill's activations of a chunk, or the Selector's scores of a group of layers (three numbers in fp32
    per token and KV head, with spread one more in float64), or one layer's bootstrap evidence in three steps; and
    128 MiB, most of it cuBLAS's."""
    card_with(20)
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model = qwen3.Qwen3.random(SMALL, DEVICE, torch.bfloat16)
    weights = torch.cuda.memory_allocated() - base
    c, B, N, chunk = SMALL, 2, 32768, 2048
    config = SFIConfig.preset("robust", policy="interval", refresh_interval=4)
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        full, logits, _ = read_prompts(model, [[5] * N] * B, config, 64, chunk)
        memory = SlowFastMemory(model, full, config)
        for _ in decode(model, memory, logits, config, 12):
            pass
    peak = torch.cuda.max_memory_allocated() - base
    caches = sum(t.numel() * t.element_size() for m in (full, memory) for t in vars(m).values()
                 if isinstance(t, torch.Tensor))
    G, C = c.num_key_value_heads, full.keys.shape[3]
    stated = max(16 * chunk * c.intermediate_size * 2,
                 20 * memory.group * B * G * C,
                 3 * 2 * 16 * c.num_attention_heads * C + 20 * G * C) + 2**27
    scratch = peak - weights - caches
    print(f"\npeak {peak / 1e9:.3f} GB = weights {weights / 1e9:.3f} + caches {caches / 1e9:.3f} + scratch "
          f"{scratch / 1e9:.3f} (stated: at most {stated / 1e9:.3f})")
    parameters = sum(p.numel() * p.element_size() for p in [*model.parameters.values(), model.cos, model.sin])
    assert abs(weights - parameters) < 2**21, (weights, parameters)
    assert 0 <= scratch <= stated, (peak, weights, caches, scratch, stated)


def test_too_many_tokens_are_refused_before_anything_is_allocated():
    model = build(torch.bfloat16)
    limit = model.config.max_position_embeddings
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.raises(ValueError, match=f"{limit - 10} prompt tokens and 11 new ones exceed .* {limit} positions"):
        generate(model, [5] * (limit - 10), max_new_tokens=11)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_another_card_is_made_the_current_one_first():
    with pytest.raises(ValueError, match="cuda:1 is not the current device: call torch.cuda.set_device first"):
        qwen3.load(ROOT / "tiny", "cuda:1")
    command = [sys.executable, ROOT / "sfi.py", "--prompt", ROOT / "examples" / "1k.txt", "--max-new-tokens", "40"]
    first, second = (subprocess.run([*command, "--device", device], capture_output=True, text=True, check=True).stdout
                     for device in ("cuda:0", "cuda:1"))
    assert first == second != ""
