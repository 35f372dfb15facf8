"""Decoder against Hugging Face's numbers, loader against damaged checkpoints, tokenizer against released vectors."""
import json
import math
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load_file, save_file

import model as module
from model import (METADATA, Config, NoMemory, Qwen3, Tokenizer, Yarn, causal_attention, load, mixture, rope_tables)

ROOT = Path(__file__).parents[1]
ORACLES = sorted((ROOT / "golden" / "qwen3").iterdir())
DENSE = [folder for folder in ORACLES if folder.name.startswith("dense")]
TOKENIZER = ROOT / "golden" / "tokenizer"
VECTORS = json.loads((TOKENIZER / "vectors.json").read_text(encoding="utf-8"))
BPE = Tokenizer(TOKENIZER, 151936)

SMALL = dict(model_type="qwen3", vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128)
WORDY = SMALL | dict(vocab_size=151936, hidden_size=2, num_hidden_layers=1)      # has room for the tokenizer's ids
MOE = dict(SMALL, model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)


def small(**changes):
    return Config.from_json(SMALL | changes)


def without(key, values=SMALL):
    return {other: value for other, value in values.items() if other != key}


def error_line(action, kind=ValueError):
    with pytest.raises(kind) as caught:
        action()
    line = str(caught.value)
    assert line and "\n" not in line
    return line


def ids_of(folder):
    return load_file(folder / "expected.safetensors")["input_ids"].long()


# The decoder

@pytest.mark.parametrize("folder", ORACLES, ids=lambda folder: folder.name)
def test_logits_in_fp32_are_hugging_faces(folder):
    expected = load_file(folder / "expected.safetensors")
    logits = load(folder, dtype=torch.float32).logits(expected["input_ids"])
    assert logits.shape == (len(expected["input_ids"]), 512) and logits.dtype == torch.float32
    assert (logits[-8:] - expected["logits_fp32"]).abs().max() < 1e-4


@pytest.mark.parametrize("folder", DENSE, ids=lambda folder: folder.name)
def test_bf16_is_as_near_to_fp32_as_hugging_faces_bf16(folder):
    expected = load_file(folder / "expected.safetensors")
    ours = load(folder).logits(expected["input_ids"])[-8:] - expected["logits_fp32"]
    theirs = expected["logits_bf16"] - expected["logits_fp32"]
    assert ours.square().mean() < 1.5 * theirs.square().mean()
    assert ours.abs().max() < 1.5 * theirs.abs().max()


@pytest.mark.parametrize("folder", [DENSE[1], ORACLES[-1]], ids=lambda folder: folder.name)
def test_float64_goes_all_the_way(folder):
    model = load(folder, dtype=torch.float64)
    logits = model.logits(ids_of(folder))
    assert logits.dtype == torch.float64
    for name, weight in model.parameters.items():   # 1e-7 anywhere in between would show as more than this
        assert weight.dtype == torch.float64, name
    assert (logits[-8:] - load_file(folder / "expected.safetensors")["logits_fp32"]).abs().max() < 1e-4
    angle = 300 * model.config.rope_theta ** (-2 / 32)
    assert abs(model.cos[300, 1].item() - math.cos(angle)) < 1e-12


def test_bf16_rounds_where_hugging_face_rounds():
    """A plain layer in Hugging Face's order; norm weights are not one. Scaling before rounding would change bits."""
    config, dtype = small(num_hidden_layers=1), torch.bfloat16
    model = Qwen3.random(config, dtype=dtype)
    layer, T = model.layers[0], 40
    ids = torch.arange(T)

    def norm(x, weight):
        x = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return weight * x.to(dtype)

    def rotate(x):                                                          # [T, heads, D]
        frequencies = 1 / config.rope_theta ** (torch.arange(0, 32, 2).float() / 32)
        angles = torch.cat([torch.arange(T)[:, None] * frequencies] * 2, dim=-1)[:, None]
        half = torch.cat([-x[..., 16:], x[..., :16]], dim=-1)
        return x * angles.cos().to(dtype) + half * angles.sin().to(dtype)

    x = model.embed_tokens[ids]
    q, k, v = F.linear(norm(x, layer.input_layernorm), layer.qkv).view(T, 8, 32).split([4, 2, 2], dim=1)
    q, k = rotate(norm(q, layer.q_norm)), rotate(norm(k, layer.k_norm))
    mixed = causal_attention(q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], 32 ** -0.5)[0]
    x = x + F.linear(mixed.flatten(1), layer.o_proj)
    gate, up = F.linear(norm(x, layer.post_attention_layernorm), layer.gate_up).chunk(2, dim=-1)
    x = x + F.linear(F.silu(gate) * up, layer.down)
    expected = F.linear(norm(x, model.norm), model.lm_head).float()
    assert torch.equal(model.logits(ids), expected)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_query_head_reads_kv_head_of_its_group(group):
    q, keys = torch.randn(1, 3, 2 * group, 8), torch.randn(1, 2, 7, 8)
    values = torch.arange(2.0)[None, :, None, None].expand(1, 2, 7, 8)
    expected = torch.arange(2 * group) // group
    torch.testing.assert_close(causal_attention(q, keys, values, 1.0)[0, 1, :, 0], expected.float())


@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from([1, 3]))
@settings(deadline=None, max_examples=30)
def test_attention_of_a_chunk_sees_exactly_its_past(T, before, group):
    N = before + T
    q, keys, values = (torch.randn(2, *shape, dtype=torch.float64) for shape in
                       ((T, 2 * group, 8), (2, N, 8), (2, N, 8)))
    out = causal_attention(q, keys, values, 0.5)
    for t in range(T):
        seen = before + t + 1
        z = torch.einsum("bghd,bgnd->bghn", q[:, t].unflatten(1, (2, group)), keys[:, :, :seen]) * 0.5
        expected = torch.einsum("bghn,bgnd->bghd", z.softmax(-1), values[:, :, :seen]).flatten(1, 2)
        torch.testing.assert_close(out[:, t], expected)


def test_observer_sees_what_leaves_each_layer_and_rows_do_not_mix():
    model = Qwen3.random(small())
    ids = torch.randint(96, (2, 5))
    seen = []
    step = SimpleNamespace(positions=torch.arange(5).expand(2, 5))
    hidden = model.forward(ids, step, NoMemory(), lambda layer, x: seen.append((layer, x)))
    assert [layer for layer, _ in seen] == [0, 1] and torch.equal(seen[-1][1], hidden)
    for row in range(2):
        torch.testing.assert_close(model.head(hidden[row]), model.logits(ids[row]))


def test_random_models_of_one_seed_are_equal_and_norms_are_not_one():
    one, two, other = (Qwen3.random(small(), seed=seed).parameters for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) and not torch.equal(one[name], other[name]) for name in one)
    assert (one["model.norm.weight"] - 1).abs().mean() > 0.1


@pytest.mark.parametrize("ids", [[], [[1, 2]], [96], [-1], [0] * 129])
def test_logits_refuse_what_is_no_row_of_token_ids(ids):
    error_line(lambda: Qwen3.random(small()).logits(ids))


# The mixture of experts

def moe(**changes):
    return Qwen3.random(Config.from_json(MOE | changes))


@pytest.mark.parametrize("rows", [1, 3, 7, 40])
@pytest.mark.parametrize("normed", [True, False])
def test_both_ways_through_the_experts_are_the_plain_sum(rows, normed):
    model = moe(norm_topk_prob=normed)
    layer, x = model.layers[0], torch.randn(rows, 64)
    expected = torch.zeros_like(x)
    for row in range(rows):
        share = (layer.router @ x[row]).softmax(-1)
        best = share.argsort(descending=True)[:2].tolist()
        total = share[best].sum() if normed else 1.0
        for e in best:
            gate, up, down = (model.parameters[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"]
                              for part in ("gate", "up", "down"))
            expected[row] += share[e] / total * (down @ (F.silu(gate @ x[row]) * (up @ x[row])))
    for decoding in (True, False):
        torch.testing.assert_close(mixture(x, layer, model.config, decoding), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given_value, normed", [(True, True), (False, False), (None, False)])
def test_chosen_experts_weights_sum_to_one_only_when_norm_topk_prob(given_value, normed):
    values = dict(MOE) if given_value is None else MOE | {"norm_topk_prob": given_value}
    model = Qwen3.random(Config.from_json(values))
    layer, x = model.layers[0], torch.randn(9, 64)
    layer.gate_up[:], layer.down[:] = layer.gate_up[0].clone(), layer.down[0].clone()   # every expert alike
    gate, up = F.linear(x, layer.gate_up[0]).chunk(2, dim=-1)
    one = F.linear(F.silu(gate) * up, layer.down[0])
    total = F.linear(x, layer.router).softmax(-1).topk(2).values.sum(-1, keepdim=True)
    assert total.max() < 0.99
    torch.testing.assert_close(mixture(x, layer, model.config, False), one if normed else one * total,
                               atol=1e-5, rtol=1e-4)


def test_sparse_layers_are_where_the_configuration_puts_them():
    config = Config.from_json(MOE | dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer.sparse for layer in Qwen3(config, "meta").layers] == [False, True, False, False, False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("rows", [1, 8])
def test_decoding_through_experts_can_be_captured(rows):
    model = Qwen3.random(Config.from_json(MOE), "cuda", ops=module.kernels.TORCH)
    x = torch.randn(rows, 64, device="cuda")
    expected = mixture(x, model.layers[0], model.config, False)
    mixture(x, model.layers[0], model.config, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(x, model.layers[0], model.config, True)
    graph.replay()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


# RoPE and YaRN

def frequency(config, i):
    """Pair i's frequency by the formula, in Python's floats."""
    size, yarn = config.head_dim, config.yarn
    plain = config.rope_theta ** (-2 * i / size)
    if yarn is None:
        return plain
    low, high = (size * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns))
                 / (2 * math.log(config.rope_theta)) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slow = min(max((i - low) / (high - low if high != low else 0.001), 0), 1)
    return plain * (1 - slow) + plain / yarn.factor * slow


@given(st.sampled_from([None, 1.0, 4.0, 40.0]), st.integers(32, 50000), st.sampled_from([10000.0, 1e6]),
       st.floats(8, 64), st.floats(0.5, 4), st.booleans(), st.sampled_from([16, 80, 128]))
@settings(deadline=None, max_examples=50)
def test_rotation_angles_follow_the_formula(factor, original, theta, fast, slow, truncate, size):
    yarn = factor and Yarn(factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate)
    config = replace(small(head_dim=size, rope_theta=theta), yarn=yarn)
    cos, sin = rope_tables(config, "cpu", torch.float64)
    scale = yarn.attention if yarn else 1.0
    for i in range(size // 2):
        assert cos[7, i].item() == pytest.approx(scale * math.cos(7 * frequency(config, i)), abs=1e-9)
        assert sin[7, i].item() == pytest.approx(scale * math.sin(7 * frequency(config, i)), abs=1e-9)


def test_yarn_divides_by_its_factor_not_by_a_ratio_of_lengths():
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    config = small(max_position_embeddings=40960, head_dim=128, rope_theta=1e6, rope_scaling=rope)
    cos, sin = rope_tables(config, "cpu", torch.float64)
    slowest = math.atan2(sin[1, -1], cos[1, -1])
    assert slowest == pytest.approx(1e6 ** (-126 / 128) / 4, rel=1e-9)
    assert config.yarn.attention == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("keys, attention", [
    (dict(attention_factor=0.9, mscale=1.0, mscale_all_dim=0.5), 0.9),
    (dict(mscale=1.0, mscale_all_dim=0.5), (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
    (dict(mscale=0.5), 0.1 * math.log(4) + 1),
    (dict(attention_factor=None), 0.1 * math.log(4) + 1)])
def test_attention_factor_of_yarn(keys, attention):
    rope = dict(rope_type="yarn", factor=4, original_max_position_embeddings=64) | keys
    assert small(rope_parameters=rope).yarn.attention == pytest.approx(attention)


def test_old_and_new_spellings_of_rope_mean_the_same():
    old = dict(factor=2.0, original_max_position_embeddings=64)
    spellings = [dict(rope_theta=5e5, rope_scaling=old | {"type": "yarn"}),
                 dict(rope_theta=5e5, rope_scaling=old | {"rope_type": "yarn", "type": "yarn"}),
                 dict(rope_theta=5e5, rope_parameters=old | {"rope_type": "yarn"}),
                 dict(rope_parameters=old | {"rope_type": "yarn", "rope_theta": 5e5})]
    assert len({small(**spelling) for spelling in spellings}) == 1
    assert small(rope_parameters=dict(rope_type="default", rope_theta=5e5)) == small(rope_theta=5e5, rope_scaling=None)


# The configuration

RELEASED = {    # hidden, intermediate, layers, heads, KV heads, tied, width of an expert; parameters
    "0.6B": (1024, 3072, 28, 16, 8, True, None, 596_049_920),
    "1.7B": (2048, 6144, 28, 16, 8, True, None, 1_720_574_976),
    "4B": (2560, 9728, 36, 32, 8, True, None, 4_022_468_096),
    "8B": (4096, 12288, 36, 32, 8, False, None, 8_190_735_360),
    "14B": (5120, 17408, 40, 40, 8, False, None, 14_768_307_200),
    "32B": (5120, 25600, 64, 64, 8, False, None, 32_762_123_264),
    "30B-A3B": (2048, 6144, 48, 32, 4, False, 768, 30_532_122_624),
    "235B-A22B": (4096, 12288, 94, 64, 4, False, 1536, 235_093_634_560)}
# What the coder's and the later instruct models' files say besides.
LATER = dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0, max_position_embeddings=262144,
             eos_token_id=[151645, 151643], pad_token_id=151643, rope_theta=1e7)


@pytest.mark.parametrize("later", [{}, LATER], ids=["first", "later"])
@pytest.mark.parametrize("size", RELEASED)
def test_released_sizes_have_their_number_of_parameters(size, later):
    hidden, intermediate, layers, heads, kv_heads, tied, expert, count = RELEASED[size]
    values = dict(architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
                  eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
                  intermediate_size=intermediate, max_position_embeddings=40960, max_window_layers=layers,
                  model_type="qwen3", num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=kv_heads,
                  rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000, sliding_window=None,
                  tie_word_embeddings=tied, torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
                  use_sliding_window=False, vocab_size=151936)
    if expert:
        values |= dict(model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=expert,
                       norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, output_router_logits=False,
                       router_aux_loss_coef=0.001)
    model = Qwen3(Config.from_json(values | later), "meta", torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters.values()) == count
    assert model.parameters["model.layers.0.self_attn.q_proj.weight"].shape == (heads * 128, hidden)
    assert model.cos.shape == (values["max_position_embeddings"] if not later else 262144, 64)


def test_head_dim_is_its_own_and_defaults_to_a_share_of_hidden():
    assert small().head_dim == 32
    assert Config.from_json(without("head_dim")).head_dim == small(head_dim=None).head_dim == 16
    for config in (small(), small(head_dim=None)):
        assert Qwen3.random(config).logits([1, 2, 3]).isfinite().all()
    assert small(num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize("changes", [
    dict(model_type="llama"), dict(model_type=None), dict(model_type=["qwen3"]), dict(attention_bias=True),
    dict(use_sliding_window=True), dict(layer_types=["full_attention", "sliding_attention"]),
    dict(layer_types=["full_attention"]), dict(quantization_config={"quant_method": "fp8"}), dict(hidden_act="gelu"),
    dict(partial_rotary_factor=0.5), dict(num_experts=4), dict(qkv_bias=True), dict(use_qk_norm=False),
    dict(shared_expert_intermediate_size=64), dict(dual_chunk_attention_config={}), dict(logit_scale=2.0),
    dict(num_attention_heads=3), dict(head_dim=31), dict(head_dim=None, hidden_size=66), dict(hidden_size=0),
    dict(num_hidden_layers=0), dict(vocab_size=-1), dict(vocab_size="96"), dict(hidden_size=64.0),
    dict(num_key_value_heads=True), dict(rms_norm_eps=0), dict(rms_norm_eps="1e-6"), dict(rms_norm_eps=math.nan),
    dict(tie_word_embeddings="false"), dict(tie_word_embeddings=1), dict(max_position_embeddings=0),
    dict(rope_theta=math.inf), dict(rope_theta=1), dict(eos_token_id="1"), dict(eos_token_id=[1, None]),
    dict(eos_token_id=True), dict(mlp_only_layers=[2]), dict(mlp_only_layers="0"), dict(intermediate_size=None),
    dict(rope_scaling=dict(rope_type="linear", factor=2.0)), dict(rope_scaling=dict(factor=2.0)),
    dict(rope_scaling=dict(type="yarn", rope_type="default", factor=2.0)), dict(rope_scaling="yarn"),
    dict(rope_scaling=dict(rope_type="yarn")), dict(rope_scaling=dict(rope_type="yarn", factor=0.5)),
    dict(rope_scaling=dict(rope_type="yarn", factor=2.0, attn_factor=0.9)),
    dict(rope_scaling=dict(rope_type="yarn", factor=2.0, beta_fast=1)),
    dict(rope_scaling=dict(rope_type="yarn", factor=2.0, partial_rotary_factor=0.5)),
    dict(rope_theta=1e6, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    dict(rope_scaling=dict(rope_type="yarn", factor=2.0), rope_parameters=dict(rope_type="yarn", factor=4.0))], ids=str)
def test_what_is_not_supported_is_refused_by_its_key(changes, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | changes))
    line = error_line(lambda: Config.load(path))
    names = {*changes, "factor"}.union(*(value for value in changes.values() if type(value) is dict))
    assert str(path) in line and any(name in line for name in names)


@pytest.mark.parametrize("changes", [
    dict(num_experts=None), dict(num_experts=0), dict(moe_intermediate_size=None), dict(num_experts_per_tok=7),
    dict(num_experts_per_tok=None), dict(decoder_sparse_step=0), dict(norm_topk_prob="yes"), dict(num_local_experts=5)],
    ids=str)
def test_wrong_mixture_of_experts_is_refused_by_its_key(changes):
    assert next(iter(changes)).removeprefix("num_local_") in error_line(lambda: Config.from_json(MOE | changes))
    assert Config.from_json(without("num_experts", MOE) | dict(num_local_experts=6)) == Config.from_json(MOE)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                 "num_attention_heads"])
def test_missing_size_is_named(key):
    assert f"{key} is missing" in error_line(lambda: Config.from_json(without(key)))


@given(st.text(min_size=1), st.integers())
@example("yarn", 0)
def test_no_unknown_key_is_ignored(key, value):
    known = METADATA | module.ONLY.keys() | Config.__dataclass_fields__.keys() - {"yarn"}
    if key not in known:
        with pytest.raises(ValueError) as caught:
            Config.from_json(SMALL | {key: value})
        assert key in str(caught.value)


# The loader

def write(folder, values=SMALL, weights=None, dtype=torch.float32, **files):
    """A checkpoint of a random model in folder; returns its weights."""
    weights = Qwen3.random(Config.from_json(values)).parameters if weights is None else weights
    weights = {name: weight.to(dtype, copy=True).contiguous() for name, weight in weights.items()}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return weights


def shard(folder, weights, where):
    """Replace the one file by files and an index; where(name) is the number of a tensor's file."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = {name: f"part-{where(name)}.safetensors" for name in weights}
    for file in set(names.values()):
        save_file({name: weight for name, weight in weights.items() if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("values", [SMALL, MOE], ids=["dense", "moe"])
def test_loading_is_exact_and_keeps_the_dtype_on_disk(values, dtype, tmp_path):
    weights = write(tmp_path, values, dtype=dtype)
    for _ in ("one file", "shards"):
        model = load(tmp_path)
        assert model.dtype == dtype and model.parameters.keys() == weights.keys()
        for name in weights:
            assert torch.equal(model.parameters[name], weights[name]), name
        assert torch.equal(load(tmp_path, dtype=torch.float64).norm, weights["model.norm.weight"].double())
        shard(tmp_path, weights, lambda name: len(name) % 3)


def test_parameters_are_views_of_what_the_decoder_reads():
    model = Qwen3.random(Config.from_json(MOE | dict(num_hidden_layers=1)))
    for name, weight in model.parameters.items():
        before, kept = model.logits(range(40)), weight.clone()
        weight.mul_(1.5)
        assert not torch.equal(model.logits(range(40)), before), name
        weight.copy_(kept)


def test_untied_head_is_its_own():
    model = Qwen3.random(small(tie_word_embeddings=False))
    before = model.logits([1, 2])
    model.parameters["lm_head.weight"].mul_(2)
    torch.testing.assert_close(model.logits([1, 2]), 2 * before)


def test_tied_checkpoint_may_carry_an_equal_head_and_no_other(tmp_path):
    values = SMALL | dict(tie_word_embeddings=True)
    weights = write(tmp_path, values)
    assert "lm_head.weight" not in weights
    expected = load(tmp_path).logits([1, 2])
    write(tmp_path, values, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert torch.equal(load(tmp_path).logits([1, 2]), expected)
    write(tmp_path, values, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    assert "lm_head.weight" in error_line(lambda: load(tmp_path))


Q = "model.layers.1.self_attn.q_proj.weight"


def test_wrong_tensors_are_refused_by_name(tmp_path):
    weights = write(tmp_path)
    write(tmp_path, weights=without(Q, weights))
    assert Q in error_line(lambda: load(tmp_path))
    write(tmp_path, weights=weights | {"model.layers.2.input_layernorm.weight": torch.ones(64)})
    assert "model.layers.2.input_layernorm.weight" in error_line(lambda: load(tmp_path))
    write(tmp_path, weights=weights | {Q: torch.ones(128, 60)})
    line = error_line(lambda: load(tmp_path))
    assert Q in line and "[128, 60]" in line and "[128, 64]" in line
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file(weights | {Q: torch.ones(128, 64).to(dtype)}, tmp_path / "model.safetensors")
        line = error_line(lambda: load(tmp_path))
        assert Q in line and "quantised" in line
    write(tmp_path, SMALL | dict(tie_word_embeddings=False), without("lm_head.weight", weights))
    assert "lm_head.weight is missing" in error_line(lambda: load(tmp_path))


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_truncated_weights_are_refused(cut, tmp_path):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert str(path) in error_line(lambda: load(tmp_path))


def test_missing_files_are_named(tmp_path):
    assert "config.json" in error_line(lambda: load(tmp_path), FileNotFoundError)
    weights = write(tmp_path)
    shard(tmp_path, weights, lambda name: len(name) % 2)
    (tmp_path / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in error_line(lambda: load(tmp_path), FileNotFoundError)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model.safetensors" in error_line(lambda: load(tmp_path), FileNotFoundError)
    assert "nowhere" in error_line(lambda: load(tmp_path / "nowhere"), FileNotFoundError)


def test_tensor_in_two_files_is_refused(tmp_path):
    weights = write(tmp_path)
    shard(tmp_path, weights, lambda name: len(name) % 2)
    save_file(weights, tmp_path / "part-1.safetensors")
    assert "also in" in error_line(lambda: load(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json",
                                  "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", [b"{", b"[1]", b"", b"\xff{}"])
def test_what_is_not_json_is_refused_by_its_file(name, text, tmp_path):
    shard(tmp_path, write(tmp_path, WORDY, generation_config={}, tokenizer_config={}), len)
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    load(tmp_path)
    (tmp_path / name).write_bytes(text)
    assert str(tmp_path / name) in error_line(lambda: load(tmp_path))


@pytest.mark.parametrize("table", [None, [], {"x": 1}])
def test_index_without_a_table_of_files_is_refused(table, tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert "weight_map" in error_line(lambda: load(tmp_path))


def test_hub_id_is_fetched_and_no_network_is_one_clear_line(tmp_path, monkeypatch):
    import huggingface_hub
    write(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert load("someone/some-model").config == small()

    def fail(name, **options):
        raise ConnectionError("no route\nmore lines")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    line = error_line(lambda: load("someone/some-model"), FileNotFoundError)
    assert "someone/some-model" in line and "no route" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card")
def test_device_that_is_not_there_is_refused():
    for device in ("cuda", "nonsense", "hpu"):
        assert device in error_line(lambda: Qwen3(small(), device))
    assert "meta" in error_line(lambda: load(DENSE[0], "meta"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to tell the peak")
def test_host_memory_stays_near_one_copy(tmp_path):
    """One open file for all tensors kept every page it had read: twice the model."""
    values = SMALL | dict(vocab_size=1000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)
    names = Qwen3(Config.from_json(values), "meta").parameters
    weights = write(tmp_path, values, {name: torch.ones(weight.shape) for name, weight in names.items()})
    size = sum(weight.numel() * 4 for weight in weights.values())
    script = ("import re, sys, model\n"
              "def peak(): return 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
              "before = peak(); model.load(sys.argv[1]); print(peak() - before)")
    output = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout
    assert size > 1e8 and 0.9 * size < int(output) < 1.4 * size


def test_stop_ids_come_from_all_three_files(tmp_path):
    write(tmp_path, WORDY | dict(eos_token_id=7), generation_config=dict(eos_token_id=[8, 9]),
          tokenizer_config=dict(eos_token="<|im_end|>"))
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    assert load(tmp_path).stop_ids == {7, 8, 9, 151645}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load(tmp_path).stop_ids == {7, 8, 151643}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "8"}')
    assert "eos_token_id" in error_line(lambda: load(tmp_path))


# The tokenizer

def test_texts_have_the_released_tokenizers_ids():
    for entry in VECTORS["texts"] + VECTORS["chats"]:
        assert BPE.encode(entry["text"]) == entry["ids"]
        assert BPE.decode(entry["ids"], skip_special_tokens=False) == unicodedata.normalize("NFC", entry["text"])


def test_chats_are_rendered_as_hugging_face_renders_them():
    for entry in VECTORS["chats"]:
        assert BPE.chat(entry["messages"], thinking=entry["thinking"]) == entry["text"]
    assert {entry["thinking"] for entry in VECTORS["chats"]} == {True, False}


def test_think_tags_are_one_id_each_and_survive_decoding():
    assert BPE.encode("<think>") == [151667] and BPE.encode("</think>") == [151668]
    ids = BPE.encode("<|im_start|><think>\nHm.\n</think>\n\nYes.<|im_end|>")
    assert BPE.decode(ids) == "<think>\nHm.\n</think>\n\nYes."


def test_sentence_ends_are_derived_from_the_vocabulary():
    ends, blank = BPE.sentence_tokens()
    assert ends == set(VECTORS["sentence_ends"])
    assert ends >= {13, 30, 0, 1773, 11319, 6313, 624, 5267, 4894, 8997, 94432, 382, 1939, 2219, 3407, 17701, 26850}
    for text in (".com", "?>", ".\\", ".,", ";", ")", '"', "!=", "?page", "3", " the", "<|im_end|>"):
        (id,) = BPE.encode(text)
        assert id not in ends | blank, text
    for text in (" ", "\n", "\n\n", "\t", "   "):
        (id,) = BPE.encode(text)
        assert id in blank - ends, text
    assert 151935 in blank      # an id that pads the model's vocabulary has no text


ids = st.lists(st.one_of(st.integers(0, 700), st.integers(151640, 151670)), max_size=30)    # half characters among them


@given(ids, st.booleans())
@settings(deadline=None)
def test_stream_is_what_decoding_all_ids_at_once_gives(ids, skip):
    stream = BPE.stream(skip)
    text = "".join(stream.push(id) for id in ids) + stream.finish()
    assert text == BPE.decode(ids, skip) == BPE.backend.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=20).map(lambda text: text + "\U0001f600\ubf55\U0001f9d1\u200d\U0001f680"))
@settings(deadline=None)
def test_stream_never_shows_half_a_character(text):
    ids = BPE.encode(text)
    stream = BPE.stream(skip_special_tokens=False)
    parts = [stream.push(id) for id in ids] + [stream.finish()]
    whole = unicodedata.normalize("NFC", text)
    assert "".join(parts) == whole
    assert "\ufffd" in whole or not any("\ufffd" in part for part in parts)
    assert "" in parts[:-1]     # an emoji of four bytes is more than one token here


def test_ids_beyond_the_vocabulary_have_no_text():
    assert BPE.decode([39, 151935, 39]) == "HH"


def tokenizer_in(folder, edit=lambda data: None, template_file=None, **config):
    data = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    edit(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file)
    return Tokenizer(folder, 151936)


HELLO = [{"role": "user", "content": "<Hi> \u4f60"}]


@pytest.mark.parametrize("template, text", [
    ("{{ messages[0].content }}{{ eos_token }}", "<Hi> \u4f60<|im_end|>"),
    ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
    ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
    ("{{ messages | tojson }}", json.dumps(HELLO, ensure_ascii=False)),
    ("{{ strftime_now('%%') }}", "%"),
    ("{{ enable_thinking }} {{ add_generation_prompt }}", "True True")])
def test_templates_have_hugging_faces_settings(template, text, tmp_path):
    assert tokenizer_in(tmp_path, eos_token="<|im_end|>", chat_template=template).chat(HELLO) == text


def test_template_may_be_one_of_a_list_or_a_file_of_its_own(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert tokenizer_in(tmp_path, chat_template=named).chat(HELLO) == "yes"
    assert tokenizer_in(tmp_path, chat_template=named, template_file="file").chat(HELLO) == "file"


@pytest.mark.parametrize("template, word", [
    ("{{ raise_exception('roles must\nalternate') }}", "roles must"), ("{% if %}", "template"),
    ("{{ 1 / 0 }}", "division"), ("{{ nobody.name }}", "nobody"), ("{{ messages.append(1) }}", "template"),
    (None, "template"), ([], "template"), ("{{ ''.__class__.__mro__ }}", "template"),
    ([{"name": "rag", "template": "x"}], "template"), ("\ud800", "template failed")])
def test_template_that_fails_is_one_line(template, word, tmp_path):
    assert word in error_line(lambda: tokenizer_in(tmp_path, chat_template=template).chat(HELLO))


def test_settings_of_training_do_not_cut_or_pad_text(tmp_path):
    def edit(data):
        data["truncation"] = dict(max_length=2, strategy="LongestFirst", stride=0, direction="Right")
        data["padding"] = dict(strategy={"Fixed": 64}, direction="Right", pad_to_multiple_of=None, pad_id=0,
                               pad_type_id=0, pad_token="!")
    text = "One two three."
    assert tokenizer_in(tmp_path, edit).encode(text) == BPE.encode(text)


def test_no_token_is_added_even_where_the_file_would_add_one(tmp_path):
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}

    def edit(data):
        data["post_processor"] = dict(type="TemplateProcessing", single=[bos, {"Sequence": {"id": "A", "type_id": 0}}],
                                      pair=[bos, {"Sequence": {"id": "A", "type_id": 0}},
                                            {"Sequence": {"id": "B", "type_id": 0}}],
                                      special_tokens={"<|endoftext|>": dict(id="<|endoftext|>", ids=[151643],
                                                                            tokens=["<|endoftext|>"])})
    tokenizer = tokenizer_in(tmp_path, edit)
    assert tokenizer.backend.encode("Hi").ids[0] == 151643
    assert tokenizer.encode("Hi") == BPE.encode("Hi")


def test_wrong_tokenizers_are_refused(tmp_path):
    assert "eos_token" in error_line(lambda: tokenizer_in(tmp_path, eos_token="<nothing>"))
    assert "ByteLevel" in error_line(lambda: tokenizer_in(tmp_path, lambda data: data.update(decoder=None)))
    nothing = dict(model=dict(type="BPE", vocab={}, merges=[]), added_tokens=[])
    assert "vocabulary is empty" in error_line(lambda: tokenizer_in(tmp_path, lambda data: data.update(nothing)))
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    assert "chat_template.jinja is not UTF-8" in error_line(lambda: tokenizer_in(tmp_path))
    line = error_line(lambda: Tokenizer(TOKENIZER, 1000))
    assert "151668" in line and "1000" in line


@pytest.mark.parametrize("key, value", [("vocab_size", 10**20), ("max_position_embeddings", 10**10),
                                        ("rope_theta", 10**400), ("rms_norm_eps", 5e-324), ("hidden_size", 0)])
def test_numbers_that_end_in_an_overflow_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a"):
        replace(Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=16, max_position_embeddings=64), **{key: value})
