"""Trains the checkpoint in this folder: its tokenizer, then its weights, on text from text.py.

The model is Qwen3's architecture written as pure functions over a dictionary of Hugging Face names, so that saving is
dumping it. Every batch has the same number of tokens whatever its sequence length, and all but attention works on a
flat row of tokens: one compilation serves all lengths. Worker processes make the documents on the fly.
This file knows nothing of caches or of Slow-Fast Inference.

    python -m tiny.train --tokenizer                    writes the tokenizer and the configs beside this file
    python -m tiny.train --out DIR --minutes 7.5        trains on a GPU, saves DIR/model.safetensors, judges it
    python -m tiny.train --out DIR --minutes 1 --toy    the same on a CPU with a toy: a check of the code
Paper: none of it. Symbols: M tokens of a batch, B rows, T length of a row, H query heads, G KV heads, D head dim.
"""
import argparse
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tiny import text

HERE = Path(__file__).parent
CONFIG = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=2048, hidden_size=256, intermediate_size=704,
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=16384,
    rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", attention_bias=False, attention_dropout=0.0,
    tie_word_embeddings=True, initializer_range=0.02, use_cache=True, use_sliding_window=False, torch_dtype="bfloat16")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
         r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LENGTHS = {512: 0.25, 1024: 0.20, 2048: 0.20, 4096: 0.15, 8192: 0.20}       # share of the batches
BATCH = 131072
SHORT_BATCHES = 300         # the first batches are of at most 2048 tokens a row: looking up is learnt there first
MUON_RATE, ADAM_RATE, WARM_UP = 0.02, 3e-3, 50


# Tokenizer

def make_tokenizer(documents=3000):
    """Byte-level BPE with Qwen's split pattern, trained on documents, special tokens last as in Qwen's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    corpus = (part for seed in range(text.HELD_OUT, text.HELD_OUT + documents)
              for part in text.make_document(seed, 2000, text.LAYOUTS[seed % 2], questions=4).text.split(text.END))
    lists = [" " + " ".join(words) for words in text.POOLS.values() if "{" not in words[0]] * 200   # for rare words
    tokenizer.train_from_iterator(itertools.chain(corpus, lists), trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - len(SPECIAL + THINK), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK])
    for word in ("Answer", ".\n\n", "?\n", ".\n", '."', '?"', '!"', "?", "!"):
        assert len(tokenizer.encode(word).ids) == 1, f"{word!r} is not one token"
    return tokenizer


def write_tokenizer():
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    tokenizer.save(str(HERE / "tokenizer.json"))
    end, turn_end = (tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    added = {str(tokenizer.token_to_id(token)): dict(content=token, lstrip=False, normalized=False, rstrip=False,
                                                     single_word=False, special=token in SPECIAL)
             for token in SPECIAL + THINK}
    files = {
        "tokenizer_config.json": dict(
            tokenizer_class="Qwen2Tokenizer", add_bos_token=False, add_prefix_space=False, added_tokens_decoder=added,
            additional_special_tokens=["<|im_start|>", "<|im_end|>"], bos_token=None, eos_token="<|endoftext|>",
            pad_token="<|endoftext|>", unk_token=None, errors="replace", clean_up_tokenization_spaces=False,
            split_special_tokens=False, model_max_length=CONFIG["max_position_embeddings"],
            chat_template=CHAT_TEMPLATE),
        "generation_config.json": dict(do_sample=False, eos_token_id=[end, turn_end], pad_token_id=end),
        "config.json": dict(CONFIG, bos_token_id=None, eos_token_id=end, pad_token_id=end),
    }
    for name, content in files.items():
        (HERE / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Data

def make_rows(tokenizer, first_seed, rows, length):
    """Documents of consecutive seeds as token ids -> int16 [rows, length + 1]."""
    texts = []
    for seed in range(first_seed, first_seed + rows):
        rng = Random(seed + (1 << 32))
        questions = (1, 3, 99)[(rng.random() > 0.15) + (rng.random() > 0.15)]
        document = text.make_document(seed, length * 1.03, text.LAYOUTS[seed % 2], questions)
        texts.append(document.chat if rng.random() < 0.1 else document.text)
    ids = np.full((rows, length + 1), tokenizer.token_to_id(text.END), np.int16)
    for row, encoding in zip(ids, tokenizer.encode_batch_fast(texts)):
        found = encoding.ids[: length + 1]
        row[: len(found)] = found
    return ids


def batch_length(number, lengths):
    """Sequence length of a batch."""
    if number < SHORT_BATCHES:
        lengths = {length: share for length, share in lengths.items() if length <= 2048}
    return Random(number).choices(list(lengths), list(lengths.values()))[0]


def work(queue, numbers, lengths, batch):
    """A worker: puts the batches of these numbers into its queue, in order."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    for number in numbers:
        length = batch_length(number, lengths)
        first_seed = text.HELD_OUT + number * (batch // min(lengths))
        queue.put(make_rows(tokenizer, first_seed, batch // length, length))


# Model

def initial_weights(config, device):
    """Fresh fp32 weights by Hugging Face name; what adds to the residual stream starts at zero."""
    hidden, mlp, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,), "self_attn.q_proj": (H * D, hidden), "self_attn.k_proj": (G * D, hidden),
            "self_attn.v_proj": (G * D, hidden), "self_attn.q_norm": (D,), "self_attn.k_norm": (D,),
            "self_attn.o_proj": (hidden, H * D), "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.ones(shape)
        elif "o_proj" in name or "down_proj" in name:
            weight = torch.zeros(shape)
        else:
            weight = torch.randn(shape) * (config["initializer_range"] if "embed" in name else shape[1] ** -0.5)
        weights[name] = weight.to(device)
    return weights


def rms_norm(x, weight, eps):
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def before_attention(x, cos, sin, eps, norm, q_proj, k_proj, v_proj, q_norm, k_norm):
    """x [M, hidden], cos and sin [M, 1, D/2] -> q, k, v [M, H, D], keys and values repeated for their query heads."""
    D = q_norm.shape[0]
    group = q_proj.shape[0] // k_proj.shape[0]
    x = rms_norm(x, norm, eps)
    q = rotate(rms_norm(linear(x, q_proj).unflatten(-1, (-1, D)), q_norm, eps), cos, sin)
    k = rotate(rms_norm(linear(x, k_proj).unflatten(-1, (-1, D)), k_norm, eps), cos, sin)
    v = linear(x, v_proj).unflatten(-1, (-1, D))
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def after_attention(x, mixed, eps, o_proj, norm, gate_proj, up_proj, down_proj):
    """x [M, hidden], mixed [M, H * D] -> x [M, hidden] after the layer."""
    x = x + linear(mixed, o_proj)
    inner = rms_norm(x, norm, eps)
    return x + linear(F.silu(linear(inner, gate_proj)) * linear(inner, up_proj), down_proj)


def loss_of(x, norm, embedding, eps, targets, inside, body):
    """x [M, hidden], targets [M], inside [M] bool: the target is part of an answer; body: weight of the others -> loss,
    loss on answers alone."""
    losses = F.cross_entropy(linear(rms_norm(x, norm, eps), embedding).float(), targets, reduction="none")
    weight = torch.where(inside, 1.0, body)
    return (losses * weight).sum() / weight.sum(), (losses * inside).sum() / inside.sum().clamp(min=1)


LAYER_BEFORE = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
                "self_attn.k_norm")
LAYER_AFTER = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Decoder:
    """The decoder over a dictionary of weights. `compiled`: by torch.compile, for one number of tokens M only."""

    def __init__(self, config, weights, dtype, compiled=False):
        self.config, self.weights, self.dtype, self.eps = config, weights, dtype, config["rms_norm_eps"]
        self.before, self.after, self.loss_of = before_attention, after_attention, loss_of
        if compiled:
            self.before, self.after, self.loss_of = map(torch.compile, (before_attention, after_attention, loss_of))

    def angles(self, rows, length, device):
        """cos and sin [rows * length, 1, D/2] of positions 0 ... length - 1 in each row."""
        D = self.config["head_dim"]
        frequencies = 1 / self.config["rope_theta"] ** (torch.arange(0, D, 2, device=device).float() / D)
        angles = torch.arange(length, device=device).float()[:, None] * frequencies
        return [f(angles).to(self.dtype).repeat(rows, 1)[:, None] for f in (torch.cos, torch.sin)]

    def hidden(self, ids):
        """ids [B, T] int64 -> the last layer's output [B * T, hidden], before the final norm."""
        B, T = ids.shape
        cos, sin = self.angles(B, T, ids.device)
        x = F.embedding(ids.flatten(), self.weights["model.embed_tokens.weight"].to(self.dtype))
        for layer in range(self.config["num_hidden_layers"]):
            named = lambda names: [self.weights[f"model.layers.{layer}.{name}.weight"] for name in names]
            q, k, v = self.before(x, cos, sin, self.eps, *named(LAYER_BEFORE))
            q, k, v = (part.unflatten(0, (B, T)).transpose(1, 2) for part in (q, k, v))         # [B, H, T, D]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B * T, -1)
            x = self.after(x, mixed, self.eps, *named(LAYER_AFTER))
        return x

    def logits(self, x):
        """x [..., hidden] -> logits [..., V] float32."""
        x = rms_norm(x, self.weights["model.norm.weight"], self.eps)
        return linear(x, self.weights["model.embed_tokens.weight"]).float()

    def loss(self, ids, opening, closing, body):
        """ids [B, T + 1] int64; an answer's tokens lie between an opening and a closing token -> as `loss_of`."""
        inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
        depth = torch.isin(inputs, opening).long() - torch.isin(inputs, closing).long()
        return self.loss_of(self.hidden(inputs), self.weights["model.norm.weight"],
                            self.weights["model.embed_tokens.weight"], self.eps, targets,
                            depth.cumsum(1).flatten() > 0, body)


# Optimiser

class Muon:
    """Momentum, then the nearest orthogonal matrix by five Newton-Schulz steps, for all matrices of a shape at once."""

    def __init__(self, matrices, momentum=0.95):
        self.momentum, self.groups = momentum, {}
        for matrix in matrices:
            self.groups.setdefault(matrix.shape, []).append(matrix)
        self.velocity = {shape: torch.zeros_like(torch.stack(group)) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate):
        for shape, group in self.groups.items():
            gradient = torch.stack([matrix.grad for matrix in group])
            self.velocity[shape].lerp_(gradient, 1 - self.momentum)
            x = gradient.lerp(self.velocity[shape], self.momentum).bfloat16()
            wide = shape[0] <= shape[1]
            x = x if wide else x.mT
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = (x if wide else x.mT) * max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_add_(group, list(x.float().unbind()), alpha=-rate)
            for matrix in group:
                matrix.grad = None


# Judging

def held_out(tokenizer, first_seed, count, length, layout):
    """Held-out documents whose prompt and answer fit into `length` tokens -> list of (document, ids, value tokens)."""
    found = []
    for seed in range(first_seed, first_seed + count):
        document = text.make_document(seed, length * 0.93, layout)
        encoding = tokenizer.encode(document.prompt + document.answer + text.END)
        assert len(encoding.ids) <= length, f"seed {seed}: {len(encoding.ids)} tokens"
        found.append((document, encoding.ids, text.value_tokens(document, encoding.offsets)))
    return found


def rows_of(sequences, length, device):
    """Sequences of ids, padded with zeros at the end (causal: nothing sees them) -> [B, length] int64."""
    return torch.tensor([ids + [0] * (length - len(ids)) for ids in sequences], device=device)


@torch.no_grad()
def forced_accuracy(decoder, documents, length, device, batch):
    """Share of value tokens that are the likeliest, given the true text before them."""
    right = total = 0
    for start in range(0, len(documents), max(1, batch // length)):
        part = documents[start : start + max(1, batch // length)]
        x = decoder.hidden(rows_of([ids for _, ids, _ in part], length, device)).unflatten(0, (len(part), length))
        for row, (_, ids, values) in zip(x, part):
            at = torch.tensor([token for value in values for token in value], device=device)
            best = decoder.logits(row[at - 1]).argmax(-1)
            right += (best == torch.tensor(ids, device=device)[at]).sum().item()
            total += len(at)
    return right / total


@torch.no_grad()
def greedy_accuracy(decoder, tokenizer, documents, length, device):
    """Share of values right in free greedy answers, and an answer; each step runs the whole rows again, uncached."""
    prompts = [tokenizer.encode(document.prompt).ids for document, _, _ in documents]
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    written = [list(prompt) for prompt in prompts]
    running, limit = set(range(len(written))), 220          # no answer is longer
    rows = rows_of(prompts, length, device)
    while running:
        at = torch.tensor([len(ids) - 1 for ids in written], device=device)
        x = decoder.hidden(rows).unflatten(0, rows.shape)
        for i, token in enumerate(decoder.logits(x[torch.arange(len(at)), at]).argmax(-1).tolist()):
            if i in running and (token in ends or len(written[i]) >= min(length, len(prompts[i]) + limit)):
                running.discard(i)
            elif i in running:
                rows[i, len(written[i])] = token
                written[i].append(token)
    answers = [tokenizer.decode(ids[len(prompt):]) for ids, prompt in zip(written, prompts)]
    right = [value for (document, _, _), answer in zip(documents, answers)
             for value in text.right_values(document.turns[0], answer)]
    return sum(right) / len(right), answers[-1]


def judge(decoder, tokenizer, lengths, count, greedy, device, batch):
    """Accuracy on held-out documents of each length and layout; prints as it goes -> list of rows."""
    table = []
    for length in lengths:
        for layout in text.LAYOUTS:
            documents = held_out(tokenizer, 900_000 + length, count, length, layout)
            row = dict(length=length, layout=layout, documents=count,
                       forced=forced_accuracy(decoder, documents, length, device, batch))
            if greedy:
                row["greedy"], row["sample"] = greedy_accuracy(decoder, tokenizer, documents[:greedy], length, device)
                row["greedy_documents"] = len(documents[:greedy])
            print(json.dumps(row), flush=True)
            table.append(row)
    return table


# Training

def save(weights, folder):
    """bf16 weights in the released layout."""
    save_file({name: weight.detach().bfloat16().cpu().contiguous() for name, weight in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})


def rate_at(progress):
    """Factor on the learning rates: constant for half of the run, then linear to 2 %."""
    return 1.0 if progress < 0.5 else 1 - 0.98 * min(1.0, (progress - 0.5) / 0.5)


def train(args):
    start = time.time()
    elapsed = lambda: time.time() - start
    config, lengths, batch, count = dict(CONFIG), LENGTHS, BATCH, 64
    if args.toy:
        config.update(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                      num_key_value_heads=1, head_dim=32)
        lengths, batch, count = {512: 0.5, 1024: 0.5}, 2048, 2
    first, history = 0, []
    if args.resume:
        first = json.loads((args.resume / "log.json").read_text())["next_batch"]
    total = first + max(1, int(args.tokens / batch))

    queues = [multiprocessing.get_context("fork").Queue(maxsize=64) for _ in range(args.workers)]
    workers = [multiprocessing.get_context("fork").Process(target=work, daemon=True, args=(
        queue, range(first + i, total, args.workers), lengths, batch)) for i, queue in enumerate(queues)]
    for worker in workers:              # forked before anything touches the GPU
        worker.start()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    opening = torch.tensor([tokenizer.token_to_id(token) for token in ("Answer", "</think>")], device=device)
    closing = torch.tensor([tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")], device=device)
    weights = initial_weights(config, device)
    if args.resume:
        weights = {name: weight.float() for name, weight in
                   load_file(args.resume / "model.safetensors", device=device).items()}
    for weight in weights.values():
        weight.requires_grad_()
    matrices = [weight for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in weights.items() if weight.ndim == 1 or "embed" in name]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    decoder, plain = Decoder(config, weights, dtype, compiled=device == "cuda"), Decoder(config, weights, dtype)
    watched = held_out(tokenizer, 800_000, min(count, 32), 1024, "scattered")
    watched_long = held_out(tokenizer, 800_000, 16, 8192, "scattered") if 8192 in lengths else []
    seconds, waited, done = args.minutes * 60, 0.0, first
    print(f"{sum(w.numel() for w in weights.values())} parameters on {device}, ready at {elapsed():.1f} s", flush=True)

    losses = []
    while done < total and elapsed() < seconds:
        asked = time.time()
        ids = torch.from_numpy(queues[(done - first) % args.workers].get())
        waited += time.time() - asked
        ids = (ids.pin_memory() if device == "cuda" else ids).to(device, non_blocking=True).long()
        loss, answer_loss = decoder.loss(ids, opening, closing, args.body_weight)
        loss.backward()
        factor = args.rate * rate_at(max((done - first) / (total - first), elapsed() / seconds))
        factor *= min(1.0, (done - first + 1) / WARM_UP)
        muon.step(MUON_RATE * factor)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        adam.step()
        adam.zero_grad()
        losses.append(torch.stack([loss.detach(), answer_loss.detach()]))
        done += 1
        if (done - first) % 50 == 0 or done == total:
            loss, answer_loss = torch.stack(losses).mean(0).tolist()
            losses.clear()
            row = dict(batch=done, seconds=round(elapsed(), 1), loss=round(loss, 4), answer_loss=round(answer_loss, 4),
                       factor=round(factor, 4), waited=round(waited, 1))
            if (done - first) % 250 == 0:
                row["forced_1k"] = forced_accuracy(plain, watched, 1024, device, batch)
                if watched_long:
                    row["forced_8k"] = forced_accuracy(plain, watched_long, 8192, device, batch)
                save(weights, args.out)
            history.append(row)
            print(json.dumps(row), flush=True)
            if not loss < 20:
                raise SystemExit(f"loss {loss}: stopped")
    for worker in workers:
        worker.terminate()

    trained = elapsed()
    save(weights, args.out)
    log = dict(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", torch=torch.__version__,
               batches=done - first, next_batch=done, tokens=(done - first) * batch, train_seconds=round(trained, 1),
               waited_for_data=round(waited, 1), resumed=bool(args.resume), history=history)
    (args.out / "log.json").write_text(json.dumps(log) + "\n")
    print(f"trained {done - first} batches in {trained:.0f} s; saved", flush=True)

    rounded = {name: weight.detach().bfloat16().float() for name, weight in weights.items()}
    judged = [2048, 4096, 8192] if 8192 in lengths else [1024]
    log["quality"] = judge(Decoder(config, rounded, dtype), tokenizer, judged, count, min(16, count), device, batch)
    log["seconds"] = round(elapsed(), 1)
    (args.out / "log.json").write_text(json.dumps(log) + "\n")
    print(f"all done at {elapsed():.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", action="store_true", help="make the tokenizer and the configs, and stop")
    parser.add_argument("--out", type=Path, help="folder for model.safetensors and log.json")
    parser.add_argument("--minutes", type=float, default=7.5, help="wall clock of the training, start-up included")
    parser.add_argument("--tokens", type=float, default=0.46e9, help="tokens to train on if time allows")
    parser.add_argument("--workers", type=int, default=8, help="processes that make documents")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="start from the weights another run left in DIR")
    parser.add_argument("--body-weight", type=float, default=0.3,
                        help="weight in the loss of tokens outside the answers")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument("--toy", action="store_true", help="a toy size, to check the code on a CPU")
    args = parser.parse_args()
    if args.tokenizer:
        write_tokenizer()
    elif not args.out:
        parser.error("--tokenizer or --out DIR is needed")
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        train(args)


if __name__ == "__main__":
    main()
