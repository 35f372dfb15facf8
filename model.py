"""Qwen3 and Qwen3-MoE: configuration, decoder, checkpoint loader and tokenizer.

The decoder hands q, k and v of a layer to a memory and gets the attention's output back. It knows nothing of caches,
slow or fast steps: those are the memory's (sfi.py). Its arithmetic comes from a table of operations (kernels.py).
Paper: the backbone, which Slow-Fast Inference leaves as it was trained.

Symbols: B rows of a batch, T tokens of one call, M = B T, H query heads, G KV heads, D head dim, L layers,
P positions, V vocabulary, E experts, A experts per token, I width of an MLP. Weights have Hugging Face's names.
"""
import codecs
import json
import math
import re
import unicodedata
import warnings
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import jinja2
import tokenizers
import torch
import torch.nn.functional as F
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from torch.nn.attention.bias import causal_lower_right

import kernels

# Keys of config.json that do not change what a trained decoder computes.
METADATA = frozenset("""
    model_type architectures transformers_version torch_dtype dtype _name_or_path _commit_hash use_cache
    _attn_implementation attn_implementation _attn_implementation_autoset initializer_range bos_token_id pad_token_id
    router_aux_loss_coef output_router_logits attention_dropout max_window_layers sliding_window
    id2label label2id num_labels problem_type task_specific_params tokenizer_class model_max_length
    return_dict output_attentions output_hidden_states torchscript gradient_checkpointing chunk_size_feed_forward
    unsloth_fixed unsloth_version transformers.js_config
""".split())
# Keys with one supported value.
ONLY = dict(hidden_act="silu", attention_bias=False, qkv_bias=False, use_qk_norm=True, use_sliding_window=False,
            shared_expert_intermediate_size=0, partial_rotary_factor=1.0, quantization_config=None,
            compression_config=None, auto_map=None, is_encoder_decoder=False, add_cross_attention=False)
KINDS = {int: "a whole number from 1 to 2^31", float: "a number from 1e-30 to 1e30", bool: "true or false",
         tuple: "a list of whole numbers, none negative"}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Checked:
    """Base of a frozen dataclass whose values must have their field's type, as KINDS says, or be the default.

    The bounds are wide: what lies beyond them would end in an overflow, not in a model.
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            if field.type is tuple:
                right = type(value) is tuple and all(type(item) is int and item >= 0 for item in value)
            elif field.type is float:
                right = type(value) in (int, float) and 1e-30 <= value <= 1e30
            else:
                right = type(value) is field.type and (field.type is not int or 0 < value <= 2**31)
            if not right:
                raise ValueError(f"{field.name} must be {KINDS.get(field.type, field.type.__name__)}, not {value!r}")

    @classmethod
    def parse(cls, values):
        """An instance from a JSON object, in which null counts as absent. ValueError names a missing or unknown key."""
        values = {key: tuple(v) if type(v) is list else v for key, v in values.items() if v is not None}
        for key in values:
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"{key} is not supported (its value is {values[key]!r})")
        for field in fields(cls):
            if field.default is MISSING and field.name not in values:
                raise ValueError(f"{field.name} is missing")
        return cls(**values)


@dataclass(frozen=True)
class Yarn(Checked):
    """YaRN's part of rope_parameters, in Hugging Face's names (arXiv 2309.00071)."""
    factor: float
    original_max_position_embeddings: int
    attention_factor: float = None
    mscale: float = None
    mscale_all_dim: float = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must be above beta_slow = {self.beta_slow}")

    @property
    def attention(self):
        """What cos and sin are multiplied with."""
        def scale(weight):
            return 0.1 * weight * math.log(self.factor) + 1
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1)


@dataclass(frozen=True)
class Config(Checked):
    """What config.json says of a Qwen3 or Qwen3-MoE decoder. Raises ValueError naming the key that is wrong."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None         # None: num_attention_heads
    head_dim: int = None                    # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn = None
    tie_word_embeddings: bool = False
    eos_token_id: tuple = ()
    num_experts: int = 0                    # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple = ()

    def __post_init__(self):
        super().__post_init__()
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(f"head_dim is missing, and hidden_size = {self.hidden_size} is not a multiple of "
                                 f"num_attention_heads = {heads}")
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = "
                             f"{self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even")
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta = {self.rope_theta} must be above 1")
        if self.num_experts:
            if not self.moe_intermediate_size:
                raise ValueError("moe_intermediate_size is missing")
            if not 0 < self.num_experts_per_tok <= self.num_experts:
                raise ValueError(f"num_experts_per_tok = {self.num_experts_per_tok} must be from 1 to num_experts = "
                                 f"{self.num_experts}")
        if any(layer >= self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers = {list(self.mlp_only_layers)} names a layer beyond num_hidden_layers = "
                             f"{self.num_hidden_layers}")

    @classmethod
    def load(cls, path):
        """The Config of a config.json: every key is used, known to be harmless (METADATA) or refused by its name."""
        values = read_json(path)
        try:
            return cls.from_json(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, values):
        """The Config of a JSON object in the form of config.json, old and new spellings of RoPE's keys alike."""
        values = dict(values)
        kind = values.get("model_type")
        if kind not in ("qwen3", "qwen3_moe"):
            raise ValueError(f"model_type {kind!r} is not supported, only 'qwen3' and 'qwen3_moe' are")
        for key, only in ONLY.items():
            value = values.pop(key, None)
            if value is not None and value != only:
                raise ValueError(f"{key} = {value!r} is not supported, only {only!r} is")
        if values.get("yarn") is not None:                                  # a field here, but no key of config.json
            raise ValueError(f"yarn is not supported (its value is {values['yarn']!r})")
        values.update(parse_rope(values))
        values["eos_token_id"] = id_list(values.pop("eos_token_id", None), "eos_token_id")
        experts = agreed("num_experts", values.pop("num_experts", None), values.pop("num_local_experts", None))
        if (kind == "qwen3_moe") != bool(experts):
            raise ValueError(f"num_experts = {experts!r} does not go with model_type {kind!r}")
        values["num_experts"] = experts
        layer_types = values.pop("layer_types", None)
        config = cls.parse({key: value for key, value in values.items() if key not in METADATA})
        if layer_types not in (None, ["full_attention"] * config.num_hidden_layers):
            raise ValueError("layer_types is not supported, except 'full_attention' for each layer")
        return config


def agreed(key, *values):
    """The one value of a key that has several spellings, or None. ValueError if they differ."""
    values = [value for value in values if value is not None]
    if any(value != values[0] for value in values):
        raise ValueError(f"{key} is given twice, as {values[0]!r} and as {values[1]!r}")
    return values[0] if values else None


def parse_rope(values):
    """Take RoPE's keys out of a config.json's values -> {"rope_theta": float or None, "yarn": Yarn or None}."""
    rope = agreed("rope_parameters (or rope_scaling)", values.pop("rope_parameters", None) or None,
                  values.pop("rope_scaling", None) or None) or {}
    if type(rope) is not dict:
        raise ValueError(f"rope_parameters (or rope_scaling) must be an object, not {rope!r}")
    rope = dict(rope)
    kind = agreed("rope_type (or type)", rope.pop("rope_type", None), rope.pop("type", None)) or "default"
    theta = agreed("rope_theta", rope.pop("rope_theta", None), values.pop("rope_theta", None))
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor is not supported, only 1 is")
    if kind == "default":
        for key in rope:
            raise ValueError(f"{key} is not supported with rope_type 'default'")
        return dict(rope_theta=theta, yarn=None)
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not supported, only 'default' and 'yarn' are")
    rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
    return dict(rope_theta=theta, yarn=Yarn.parse(rope))


def id_list(value, key):
    """Token ids given as null, one number or a list -> a tuple of them."""
    ids = () if value is None else tuple(value) if type(value) is list else (value,)
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{key} must be a token id or a list of them, not {value!r}")
    return ids


def rope_tables(config, device, dtype):
    """cos and sin [P, D/2] of every position's angles, rounded to dtype.

    Angles are in fp32 (float64 for a float64 model). With YaRN, slow frequencies are divided by the configured
    factor, fast ones are kept, and a ramp joins them; cos and sin carry the attention factor.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    size, yarn, attention = config.head_dim, config.yarn, 1.0
    periods = config.rope_theta ** (torch.arange(0, size, 2, dtype=wide, device=device) / size)
    frequencies = 1 / periods                                               # [D/2]
    if yarn:
        # The dimensions whose wave turns beta_fast and beta_slow times over the original context.
        low, high = (size * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
                     / (2 * math.log(config.rope_theta)) for turns in (yarn.beta_fast, yarn.beta_slow))
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001
        keep = 1 - ((torch.arange(size // 2, dtype=wide, device=device) - low) / (high - low)).clamp(0, 1)
        frequencies = 1 / (yarn.factor * periods) * (1 - keep) + frequencies * keep
        attention = yarn.attention
    angles = torch.arange(config.max_position_embeddings, dtype=wide, device=device)[:, None] * frequencies
    return (angles.cos() * attention).to(dtype), (angles.sin() * attention).to(dtype)


def causal_attention(q, keys, values, scale):
    """Dense attention of the last T of N positions, each to itself and its past.

    q [B, T, H, D], keys and values [B, G, N, D] -> [B, T, H, D].
    """
    mask = causal_lower_right(q.shape[1], keys.shape[2])
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale,
                                          enable_gqa=True).transpose(1, 2)


class NoMemory:
    """The memory of a single call from position 0: every token sees the call's own past, nothing is kept."""

    def attend(self, layer, q, k, v, step):
        return causal_attention(q, k.transpose(1, 2), v.transpose(1, 2), q.shape[-1] ** -0.5)


class Layer:
    """Weights of one decoder layer. Those that are used together are one tensor.

    `parameters` gets Hugging Face's names, as views into these tensors, so that loading is a copy by name.
    """

    def __init__(self, config, index, empty, parameters):
        def fuse(rows, *width):
            whole = empty(sum(rows.values()), *width)
            for name, part in zip(rows, whole.split(list(rows.values()))):
                parameters[f"model.layers.{index}.{name}.weight"] = part
            return whole

        c, hidden = config, config.hidden_size
        queries, pairs = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.input_layernorm = fuse({"input_layernorm": hidden})
        self.qkv = fuse({"self_attn.q_proj": queries, "self_attn.k_proj": pairs, "self_attn.v_proj": pairs}, hidden)
        self.q_norm, self.k_norm = fuse({"self_attn.q_norm": c.head_dim}), fuse({"self_attn.k_norm": c.head_dim})
        self.o_proj = fuse({"self_attn.o_proj": hidden}, queries)
        self.post_attention_layernorm = fuse({"post_attention_layernorm": hidden})
        self.sparse = (c.num_experts > 0 and index not in c.mlp_only_layers
                       and (index + 1) % c.decoder_sparse_step == 0)
        if self.sparse:
            experts, width = [f"mlp.experts.{e}" for e in range(c.num_experts)], c.moe_intermediate_size
            self.router = fuse({"mlp.gate": c.num_experts}, hidden)
            self.gate_up = fuse({f"{e}.{half}": width for e in experts for half in ("gate_proj", "up_proj")},
                                hidden).unflatten(0, (-1, 2 * width))       # [E, 2 I, hidden]
            self.down = fuse({f"{e}.down_proj": hidden for e in experts},
                             width).unflatten(0, (-1, hidden))              # [E, hidden, I]
        else:
            self.gate_up = fuse({"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}, hidden)
            self.down = fuse({"mlp.down_proj": hidden}, c.intermediate_size)


def mixture(x, layer, config, decoding):
    """A mixture-of-experts MLP of normed x [M, hidden] -> [M, hidden].

    Decoding never waits for the device, so that a CUDA graph can hold it: it gathers the chosen experts' weights, for
    few rows at a time lest the copy outgrow the layer. Otherwise each expert takes all of its rows at once.
    """
    weights = kernels.at_least_fp32(F.linear(x, layer.router)).softmax(-1)  # [M, E]
    weights, chosen = weights.topk(config.num_experts_per_tok)              # [M, A]
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    if decoding:
        rows = max(1, config.num_experts // config.num_experts_per_tok)
        for y, part, experts, weight in zip(*(t.split(rows) for t in (out, x, chosen, weights))):
            gate, up = (layer.gate_up[experts] @ part[:, None, :, None]).squeeze(-1).chunk(2, dim=-1)     # [rows, A, I]
            each = (layer.down[experts] @ (F.silu(gate) * up)[..., None]).squeeze(-1)           # [rows, A, hidden]
            y[:] = (each * weight[..., None]).sum(1)
        return out
    order = chosen.flatten().argsort(stable=True)                           # pairs (row, choice), expert by expert
    counts = chosen.flatten().bincount(minlength=config.num_experts).tolist()
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            rows = pairs // config.num_experts_per_tok
            gate, up = F.linear(x[rows], layer.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, layer.down[expert])
            out.index_add_(0, rows, y * weights.flatten()[pairs, None])
    return out


class Qwen3:
    """A decoder whose weights are not set: `load` and `Qwen3.random` give usable ones.

    config, device, dtype, ops (kernels.Ops; the device's own by default); parameters, by Hugging Face's names;
    tokenizer (a Tokenizer or None); stop_ids, a frozenset. Raises ValueError for a device that is not there, or a CUDA
    device other than the current one, on which torch makes streams and Triton runs.
    """

    def __init__(self, config, device="cpu", dtype=torch.float32, ops=None):
        def empty(*shape):
            return torch.empty(shape, device=self.device, dtype=dtype)

        self.config, self.device, self.dtype = config, usable(device), dtype
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            raise ValueError(f"{self.device} is not the current device: call torch.cuda.set_device first")
        self.ops = ops or (kernels.TRITON if self.device.type == "cuda" else kernels.TORCH)
        if dtype == torch.float64 and self.ops is kernels.TRITON:
            raise ValueError("float64 needs the CPU: the kernels compute in float32")
        self.tokenizer, self.stop_ids = None, frozenset(config.eos_token_id)
        self.embed_tokens = empty(config.vocab_size, config.hidden_size)
        self.parameters = {"model.embed_tokens.weight": self.embed_tokens}
        self.layers = [Layer(config, i, empty, self.parameters) for i in range(config.num_hidden_layers)]
        self.norm = self.parameters["model.norm.weight"] = empty(config.hidden_size)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = self.parameters["lm_head.weight"] = empty(config.vocab_size, config.hidden_size)
        self.cos, self.sin = rope_tables(config, self.device, dtype)

    @classmethod
    def random(cls, config, device="cpu", dtype=torch.float32, seed=0, ops=None):
        """A model with random weights, for tests and timings: matrices keep a vector's size, norms are not one."""
        model = cls(config, device, dtype, ops)
        generator = torch.Generator(model.device).manual_seed(seed)
        for weight in model.parameters.values():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
        return model

    def forward(self, ids, step, memory, observe=None):
        """Run tokens through the layers. ids [B, T] int64 -> hidden [B, T, hidden] before the final norm.

        step.positions [B, T] int64 are absolute; step itself is passed on to memory.attend(layer, q [B, T, H, D],
        k and v [B, T, G, D], step) -> [B, T, H, D]. observe(layer, hidden) sees what leaves each layer, and must copy
        what it keeps: the next layer may write over it.

        In bf16 the results depend on where values are rounded. The torch operations keep Hugging Face's order: RMSNorm
        rounds before its weight multiplies, cos and sin are rounded before use, every projection before the residual is
        added, the gate after silu; softmax is in fp32 and rounded after, also the router's. The Triton ones round less.
        """
        ops, c, eps = self.ops, self.config, self.config.rms_norm_eps
        positions = step.positions.flatten()                                # [M]
        x = F.embedding(ids, self.embed_tokens).flatten(0, 1)               # [M, hidden]
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(x, layer.qkv, layer.input_layernorm, eps)      # [M, (H + 2 G) D]
            q, k, v = ops.qk_norm_rope(qkv, c.num_key_value_heads, layer.q_norm, layer.k_norm, self.cos, self.sin,
                                       positions, eps)
            mixed = memory.attend(index, *(heads.unflatten(0, ids.shape) for heads in (q, k, v)), step)
            x = ops.linear(mixed.flatten(2).flatten(0, 1), layer.o_proj, residual=x)
            if layer.sparse:
                x = x + mixture(ops.rms_norm(x, layer.post_attention_layernorm, eps), layer, c, ids.shape[1] == 1)
            else:
                gated = ops.swiglu(x, layer.gate_up, layer.post_attention_layernorm, eps)   # [M, I]
                x = ops.linear(gated, layer.down, residual=x)
            if observe:
                observe(index, x.unflatten(0, ids.shape))
        return x.unflatten(0, ids.shape)

    def head(self, hidden):
        """Final norm and lm_head. hidden [..., hidden] -> logits [..., V] in fp32 (float64 for a float64 model)."""
        flat = self.ops.linear(hidden.reshape(-1, hidden.shape[-1]), self.lm_head, self.norm, self.config.rms_norm_eps)
        return kernels.at_least_fp32(flat).view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def logits(self, ids):
        """Logits of every position, dense and causal, without a cache. ids [T] -> [T, V] fp32. SPEC section 8."""
        ids = torch.as_tensor(ids, device=self.device).long()
        if ids.dim() != 1 or not 0 < len(ids) <= self.config.max_position_embeddings:
            raise ValueError(f"ids must be a row of 1 to {self.config.max_position_embeddings} "
                             f"(max_position_embeddings) token ids, not of shape {list(ids.shape)}")
        if not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise ValueError(f"ids must be from 0 to vocab_size - 1 = {self.config.vocab_size - 1}")
        step = SimpleNamespace(positions=torch.arange(len(ids), device=self.device)[None])
        return self.head(self.forward(ids[None], step, NoMemory())[0])


def usable(device):
    """torch.device(device), or ValueError if this machine has no such device."""
    try:
        with warnings.catch_warnings(action="ignore"):                      # of names that torch no longer knows
            return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {first_line(error).split('. ')[0]}") from None


def first_line(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def load(directory, device="cpu", dtype=None, ops=None):
    """Load a released Qwen3 checkpoint: config.json, safetensors in one or more files, and a tokenizer if there is one.

    directory: a folder, or a hub id such as "Qwen/Qwen3-0.6B". dtype: a torch.dtype; None is the embedding's on disk.
    Raises ValueError or FileNotFoundError, in one line, for whatever is missing, damaged, unlike the configuration or
    not supported: a returned model has every weight. Host memory holds one tensor beside the model. SPEC section 8.
    """
    if usable(device).type == "meta":
        raise ValueError("device 'meta' cannot be used: it has shapes and no numbers")
    folder = find_folder(directory)
    config = Config.load(folder / "config.json")
    tokenizer = Tokenizer(folder, config.vocab_size) if (folder / "tokenizer.json").exists() else None
    files, on_disk = check_weights(folder, config)
    model = Qwen3(config, device, dtype or on_disk, ops)
    for name, path in files.items():
        if name in model.parameters:
            model.parameters[name].copy_(read_tensor(path, name))
        elif not torch.equal(read_tensor(path, name).to(model.device, model.dtype), model.lm_head):
            raise ValueError(f"{path}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
    model.tokenizer = tokenizer
    generation = folder / "generation_config.json"
    if generation.exists():
        model.stop_ids |= frozenset(id_list(read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id"))
    if tokenizer:
        model.stop_ids |= tokenizer.stop_ids
    return model


def find_folder(directory):
    """The folder of a checkpoint, fetched from the Hugging Face hub if `directory` is no path here but an id there."""
    folder = Path(directory)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(directory)):
        raise FileNotFoundError(f"{directory} is not a folder")
    import huggingface_hub
    try:
        return Path(huggingface_hub.snapshot_download(str(directory),
                                                      allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # of many libraries: network, authorisation, no such id, no space
        raise FileNotFoundError(f"{directory} is not a folder, and the Hugging Face hub did not give it: "
                                f"{first_line(error)}") from None


def read_json(path):
    """The object in a JSON file."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if type(values) is not dict:
        raise ValueError(f"{path} is not a JSON object")
    return values


def open_weights(path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {first_line(error)}") from None


def read_tensor(path, name):
    # Opened anew for each: an open file keeps every page that was read, which would be a second copy of the model.
    with open_weights(path) as file:
        return file.get_tensor(name)


def check_weights(folder, config):
    """Compare the files' headers with the configuration before anything is allocated.

    -> ({tensor name: its file}, the embedding's dtype). ValueError for a tensor too many, too few, of another shape or
    of a type that is not a plain float.
    """
    expected = Qwen3(config, "meta").parameters
    allowed = {"lm_head.weight": expected["model.embed_tokens.weight"], **expected}
    where, types = {}, {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():
                part = file.get_slice(name)
                types[name] = part.get_dtype()
                if types[name] not in DTYPES:
                    raise ValueError(f"{path}: {name} is stored as {types[name]}; quantised weights are not supported, "
                                     f"only {', '.join(DTYPES)}")
                if name not in allowed:
                    raise ValueError(f"{path}: {name} is not a tensor of this model")
                if name in where:
                    raise ValueError(f"{path}: {name} is also in {where[name]}")
                if list(part.get_shape()) != list(allowed[name].shape):
                    raise ValueError(f"{path}: {name} has shape {list(part.get_shape())}, but by config.json it is "
                                     f"{list(allowed[name].shape)}")
                where[name] = path
    missing = [name for name in expected if name not in where]
    if missing:
        raise ValueError(f"{folder}: {missing[0]} is missing" + f", and {len(missing) - 1} more" * (len(missing) > 1))
    # lm_head last: a tied one is compared with the embedding.
    return (dict(sorted(where.items(), key=lambda item: item[0] == "lm_head.weight")),
            DTYPES[types["model.embed_tokens.weight"]])


def weight_files(folder):
    """The safetensors files of a checkpoint."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    names = read_json(index).get("weight_map")
    if type(names) is not dict or not all(type(name) is str for name in names.values()):
        raise ValueError(f"{index}: weight_map must name the file of each tensor")
    files = [folder / name for name in sorted(set(names.values()))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {path.name}, which is not there")
    return files


def byte_of_character():
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
                 *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """The byte-level BPE of a folder's tokenizer.json, with the chat template and the stop token beside it.

    vocab_size: the model's, which may be padded beyond the tokenizer's. Raises ValueError for a file that is damaged
    or of another kind.
    """

    def __init__(self, folder, vocab_size=None):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: {first_line(error)}") from None
        if not isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"{path}: only the ByteLevel decoder is supported")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_ids = {id for id, token in self.backend.get_added_tokens_decoder().items() if token.special}
        size = 1 + max(self.backend.get_vocab().values(), default=-1)
        if not size:
            raise ValueError(f"{path}: the vocabulary is empty")
        self.vocab_size = vocab_size or size
        if size > self.vocab_size:
            raise ValueError(f"{path}: token id {size - 1} is beyond the model's vocab_size = {vocab_size}")

        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        self.names = {}                                                     # such as eos_token: its text
        for key, value in settings.items():
            value = value.get("content") if type(value) is dict else value
            if key.endswith("_token") and type(value) is str:
                self.names[key] = value
        eos = self.backend.token_to_id(self.names["eos_token"]) if "eos_token" in self.names else None
        if "eos_token" in self.names and eos is None:
            raise ValueError(f"{config}: eos_token {self.names['eos_token']!r} is not a token of tokenizer.json")
        self.stop_ids = frozenset() if eos is None else frozenset([eos])

        template, own_file = settings.get("chat_template"), folder / "chat_template.jinja"
        if own_file.exists():
            try:
                template = own_file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{own_file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        if type(template) is list:                                          # of named templates
            template = next((entry.get("template") for entry in template
                             if type(entry) is dict and entry.get("name") == "default"), None)
        self.chat_template = template

    def encode(self, text):
        """Token ids of text. Special tokens spelled out in it become their ids; none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def pieces(self):
        """{token id: its bytes}; a character that is cut apart is in several."""
        byte = byte_of_character()
        return {id: bytes(map(byte.get, text)) if byte.keys() >= set(text) else text.encode()
                for text, id in self.backend.get_vocab().items()}

    def piece(self, id, skip_special_tokens=True):
        return b"" if skip_special_tokens and id in self.special_ids else self.pieces.get(id, b"")

    def decode(self, ids, skip_special_tokens=True):
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; ids beyond the tokenizer's vocabulary nothing."""
        return b"".join(self.piece(id, skip_special_tokens) for id in ids).decode("utf-8", "replace")

    def stream(self, skip_special_tokens=True):
        """A TextStream, to decode ids one by one."""
        return TextStream(self, skip_special_tokens)

    def chat(self, messages, thinking=True):
        """The text of a prompt made from messages [{"role": ..., "content": ...}] by the chat template.

        thinking is the template's enable_thinking: Qwen3 thinks unless it is False. Raises ValueError where there is no
        template, or it fails.
        """
        if type(self.chat_template) is not str:
            raise ValueError("the tokenizer has no chat template")

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = (
            lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))
        environment.globals.update(raise_exception=raise_exception,
                                   strftime_now=lambda format: datetime.now().strftime(format))
        try:
            text = environment.from_string(self.chat_template).render(
                **self.names, messages=messages, tools=None, documents=None, add_generation_prompt=True,
                enable_thinking=thinking)
            text.encode()                                                   # JSON can hold half a character
            return text
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template failed: {first_line(error)}") from None

    def sentence_tokens(self):
        """(ends, blank): ids of the tokens whose text ends a sentence, and of those that are only white space.

        An end may be followed by closing quotes, closing brackets and white space in the same token. SPEC section 4.
        """
        ends, blank = set(), set()
        for id in range(self.vocab_size):
            text = self.pieces.get(id, b"").decode("utf-8", "replace").rstrip()
            if not text:
                blank.add(id)
            while text and may_follow_end(text[-1]):
                text = text[:-1]
            if text.endswith((".", "?", "!", "\u3002", "\uff1f", "\uff01", "\u2026")):
                ends.add(id)
        return frozenset(ends), frozenset(blank)


def may_follow_end(character):
    return character.isspace() or character in "\"'" or unicodedata.category(character) in ("Pe", "Pf")


class TextStream:
    """Text of token ids that come one by one: never half a character, and in sum what decode says of them all."""

    def __init__(self, tokenizer, skip_special_tokens=True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id):
        """The text that this id completes, possibly none."""
        return self.decoder.decode(self.tokenizer.piece(id, self.skip_special_tokens))

    def finish(self):
        """What is left when no more ids come."""
        return self.decoder.decode(b"", final=True)
