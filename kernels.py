"""The operations of a step: each as a torch function, the truth, and as a Triton kernel of the same signature.

The decoder (model.py) and the memories (sfi.py) call them through an `Ops` table and never ask which kind
they got: `TORCH` runs on any device, `TRITON` on a CUDA card or in Triton's interpreter. This file knows
nothing of tokens, sentences or checkpoints, and keeps no state.
Paper: memory layout and asynchronous pipeline. SPEC sections 2, 3, 5 and 6.

Symbols: B rows of the batch, M rows of a linear layer, I and O its inputs and outputs, H query heads, G KV heads, D
head dim, N cached tokens with the step's own, C capacity of the full cache, K selected tokens, S = sink + K slots of
the compact buffer, R evidence rows of one KV head, W evidence queries, Q slots of the ring, n layers selected for at
once.

A row of `plan` [B, 4] int32 says what one sequence reads in a decode step: (compact, start, end, slow). It reads
compact-buffer slots [0, compact) and cache positions [start, end), where end - 1 is the step's own token. A slot of
the compact buffer is not an absolute position.

    plan row               compact buffer                full cache
    fast  (c, edge, N, 0)  [0 .. c) sink and selected    [edge ....... N - 1]
    slow  (0, 0, N, 1)     nothing                       [0 .......... N - 1]   and leaves its logits to the Selector
    dense (0, 0, N, 0)     nothing                       [0 .......... N - 1]

`ring` keeps the last Q queries, position p in slot p % Q, for a Selector that looks at W > 1 of them. Candidates are
positions [lo, hi), which the memories call [first, edge).
"""
from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from selector import at_least_fp32, select

if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    LOG2_E = tl.constexpr(math.log2(math.e))
else:
    triton = None

    def jit(kernel):
        """Nothing can run the kernel here."""


@functools.cache
def card(device):
    """(multiprocessors, bytes of shared memory that one program may take) of a CUDA device; made up elsewhere.

    Raises ValueError for a GPU that is too old for the kernels.
    """
    if device.type != "cuda":
        return 8, 232448                                                    # few programs, an H200's shared memory
    gpu = torch.cuda.get_device_properties(device)
    if gpu.major < 8:
        raise ValueError(f"{gpu.name}: the kernels need compute capability 8.0, not {gpu.major}.{gpu.minor}")
    return gpu.multi_processor_count, gpu.shared_memory_per_block_optin


@functools.cache
def early(device):
    """Launch options of a kernel that waits for its turn: on the cards that can, it may start early."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return dict(EARLY=able, launch_pdl=able)


@jit
def wait_turn(EARLY: tl.constexpr):
    """Programmatic dependent launch: a program may be placed on the card while the kernel before it still drains.

    So it waits, before it reads anything of that kernel's, until that has finished and all it wrote can be seen.
    """
    if EARLY:
        gdc_wait()


@jit
def pass_turn(EARLY: tl.constexpr):
    """Let the next kernel's programs be placed once all of this one's have come here."""
    if EARLY:
        gdc_launch_dependents()


@jit
def take_turn(EARLY: tl.constexpr):
    """Wait for the turn and let the next kernel in at once."""
    wait_turn(EARLY)
    pass_turn(EARLY)


@jit
def offset(strides, i, j, k=None):
    """Where element (i, j) or (i, j, k) of a tensor's leading dimensions begins. A whole cache goes beyond 2^31."""
    at = tl.cast(i, tl.int64) * strides[0] + tl.cast(j, tl.int64) * strides[1]
    return at if k is None else at + tl.cast(k, tl.int64) * strides[2]


def rms_norm_torch(x, weight, eps):
    """RMSNorm over the last dimension. x [..., I], weight [I] -> [..., I], in x's dtype.

    Hugging Face's order of rounding: normalise in fp32, round to x's dtype, only then multiply.
    """
    wide = at_least_fp32(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@jit
def rms_norm_kernel(x, weight, out, eps, stride, I: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program normalises one row: it reads the row once, keeps it in registers and writes it once."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < I
    wide = tl.load(x + row * stride + column, mask=inside, other=0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / I + eps)
    rounded = wide.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + column, rounded * tl.load(weight + column, mask=inside, other=0), mask=inside)


def rms_norm_triton(x, weight, eps):
    """As rms_norm_torch, in one launch."""
    rows = x.reshape(-1, x.shape[-1])                                       # [M, I]
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(rows.shape[1])
    rms_norm_kernel[(len(rows),)](rows, weight, out, eps, rows.stride(0), rows.shape[1], block,
                                  num_warps=4 if block <= 4096 else 8, **early(x.device))
    return out.view(x.shape)


def linear_torch(x, weight, norm=None, eps=0.0, residual=None):
    """residual + norm(x) weight^T. x [M, I], weight [O, I], norm [I] or None, residual [M, O] or None -> [M, O]."""
    if norm is not None:
        x = rms_norm_torch(x, norm, eps)
    y = F.linear(x, weight)
    return y if residual is None else residual + y


@jit
def finish_linear(y, residual, out, m, o, M, O):
    """Add the residual to y, outputs `o` of rows `m` in either layout, and store it."""
    inside = (m < M) & (o < O)
    if residual is not None:
        y += tl.load(residual + m * O + o, mask=inside, other=0)
    tl.store(out + m * O + o, y, mask=inside)


@jit
def reduce_linear_kernel(x, weight, norm, residual, out, eps, x_stride, M, O, I: tl.constexpr, GATED: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
                         EARLY: tl.constexpr):
    """A linear layer for one to four rows: plain multiply and add, since reading the weight is all that costs.

    One program makes BLOCK_O outputs of every row. It walks along I in tiles of BLOCK_I: multiplies a tile of the
    weight [BLOCK_O, BLOCK_I], read once, by the same piece of each row, and keeps one sum per element until the end.
    The norm's factor is the same for a whole row, so it is found on the way and multiplied in last; the normed row is
    never rounded. With GATED the weight holds gate and up, [2 O, I], and the result is silu(gate) * up.
    """
    wait_turn(EARLY)
    m = tl.arange(0, ROWS)[:, None, None]
    o = tl.arange(0, BLOCK_O)[None, :, None]
    i = tl.arange(0, BLOCK_I)[None, None, :]
    first = tl.program_id(0) * BLOCK_O
    weight += first.to(tl.int64) * I
    total = tl.zeros([ROWS, BLOCK_O, BLOCK_I], tl.float32)
    total_up = tl.zeros([ROWS, BLOCK_O, BLOCK_I], tl.float32)
    squares = tl.zeros([ROWS, 1, BLOCK_I], tl.float32)
    for start in tl.range(0, I, BLOCK_I, num_stages=STAGES):
        row = tl.load(x + m * x_stride + start + i, mask=(m < M) & (start + i < I), other=0).to(tl.float32)
        if norm is not None:
            squares += row * row
            row *= tl.load(norm + start + i, mask=start + i < I, other=0)
        inside = (first + o < O) & (start + i < I)
        total += row * tl.load(weight + o * I + start + i, mask=inside, other=0)
        if GATED:
            up = weight + tl.cast(O, tl.int64) * I
            total_up += row * tl.load(up + o * I + start + i, mask=inside, other=0)
    pass_turn(EARLY)
    y, y_up = tl.sum(total, 2), tl.sum(total_up, 2)                         # [ROWS, BLOCK_O]
    if norm is not None:
        factor = tl.rsqrt(tl.sum(squares, 2) / I + eps)
        y, y_up = y * factor, y_up * factor
    if GATED:
        y = y * tl.sigmoid(y) * y_up
    finish_linear(y, residual, out, tl.arange(0, ROWS)[:, None], first + tl.arange(0, BLOCK_O)[None, :], M, O)


@jit
def dot_linear_kernel(x, weight, residual, out, x_stride, M, O, I: tl.constexpr, GATED: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr):
    """A linear layer for few rows on the matrix units: as reduce_linear_kernel, with the rows padded to ROWS = 16."""
    wait_turn(EARLY)
    m, o, i = tl.arange(0, ROWS), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    first = tl.program_id(0) * BLOCK_O
    weight += first.to(tl.int64) * I
    total = tl.zeros([BLOCK_O, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_O, ROWS], tl.float32)
    for start in range(0, I, BLOCK_I):
        here = start + i < I
        rows = tl.load(x + m[None, :] * x_stride + start + i[:, None], mask=(m < M)[None, :] & here[:, None], other=0)
        inside = (first + o < O)[:, None] & here[None, :]
        tile = tl.load(weight + o[:, None] * I + start + i[None, :], mask=inside, other=0)
        total = tl.dot(tile, rows, total, input_precision="ieee")
        if GATED:
            up = weight + tl.cast(O, tl.int64) * I
            tile = tl.load(up + o[:, None] * I + start + i[None, :], mask=inside, other=0)
            total_up = tl.dot(tile, rows, total_up, input_precision="ieee")
    pass_turn(EARLY)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    finish_linear(total, residual, out, m[None, :], first + o[:, None], M, O)


def linear_tile(M, O, I, gated, itemsize):
    """How to run a linear layer: (kernel, outputs and inputs of a tile, warps, stages), or None for cuBLAS.

    Measured on one H200 in bf16 by bench/kernels.py, microseconds, cuBLAS second: Qwen3-0.6B's o_proj 3.7 against 12.9
    at 1 row, 4.0 against 9.8 at 4, 6.1 against 7.1 at 8; 4B's gate_up 27.3 against 33.4 at 1 row. More rows are
    cuBLAS's.
    """
    if M == 1:
        if gated:
            return "reduce", 8, 512, 4, 3
        return ("reduce", 16, 256, 4, 4) if O > I else ("reduce", 4, 512, 4, 4)
    if M <= 4 and not gated and (O <= 8192 if M == 2 else O * I <= 2**22):
        return "reduce", 4, 512, 4, 3
    if M <= 4 and (gated or O > I):
        return "dot", 32, 256 // itemsize, 4, 4
    if M <= 8 and (gated or O > 8192):
        return "dot", 64, 256 // itemsize, 4, 4
    if M <= 8 and O * I <= 2**21:
        return "dot", 16, 512 // itemsize, 4, 4
    return None


def launch_linear(tile, x, weight, norm, eps, residual, gated):
    """As linear_torch or swiglu_torch, by one kernel with a tile of linear_tile. Only "reduce" takes a norm."""
    kind, block_o, block_i, warps, stages = tile
    M, I = x.shape
    O = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(M, O)
    grid = (triton.cdiv(O, block_o),)
    if kind == "reduce":
        reduce_linear_kernel[grid](x, weight, norm, residual, out, eps, x.stride(0), M, O, I, gated,
                                   triton.next_power_of_2(M), block_o, block_i, stages, num_warps=warps,
                                   **early(x.device))
    else:
        dot_linear_kernel[grid](x, weight, residual, out, x.stride(0), M, O, I, gated,
                                16, block_o, block_i, num_warps=warps, num_stages=stages, **early(x.device))
    return out


def linear_triton(x, weight, norm=None, eps=0.0, residual=None):
    """As linear_torch, but the residual may be overwritten: cuBLAS would copy it first, for 1 us.

    The norm is part of the kernel for a single row, a launch of its own for more. Many rows (prefill), and the cases
    that linear_tile names, are left to cuBLAS on purpose.
    """
    card(x.device)                          # the first operation of any step: refuses a card that is too old
    tile = linear_tile(x.shape[0], *weight.shape, False, x.element_size())
    if norm is not None and x.shape[0] > 1:
        x, norm = rms_norm_triton(x, norm, eps), None
    if tile is None:
        return F.linear(x, weight) if residual is None else torch.addmm(residual, x, weight.T, out=residual)
    return launch_linear(tile, x, weight, norm, eps, residual, False)


def swiglu_torch(x, gate_up, norm, eps):
    """silu(gate) * up of norm(x). x [M, I], gate_up [2 O, I] with the gate's rows first, norm [I] -> [M, O]."""
    gate, up = linear_torch(x, gate_up, norm, eps).chunk(2, dim=-1)
    return F.silu(gate) * up


@jit
def silu_mul_kernel(gate_up, out, O, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program makes BLOCK outputs of one row from its gate and its up half, each read once."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * O + column, mask=column < O, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * O + O + column, mask=column < O, other=0)
    tl.store(out + row * O + column, gate * tl.sigmoid(gate) * up, mask=column < O)


def swiglu_triton(x, gate_up, norm, eps):
    """As swiglu_torch: one launch for a single row, norm and linear for few, norm, cuBLAS and silu_mul for many."""
    O = gate_up.shape[0] // 2
    tile = linear_tile(x.shape[0], O, gate_up.shape[1], True, x.element_size())
    if x.shape[0] > 1:
        x, norm = rms_norm_triton(x, norm, eps), None
    if tile is not None:
        return launch_linear(tile, x, gate_up, norm, eps, None, True)
    both = F.linear(x, gate_up)                                             # [M, 2 O]
    out = x.new_empty(len(x), O)
    silu_mul_kernel[(len(x), triton.cdiv(O, 1024))](both, out, O, 1024, **early(x.device))
    return out


def rotate_torch(x, cos, sin):
    """RoPE in half-split form: element i pairs with element i + D/2. x [M, heads, D], cos and sin [M, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def qk_norm_rope_torch(qkv, kv_heads, q_norm, k_norm, cos, sin, positions, eps):
    """Split a fused projection into heads, then norm and rotate q and k.

    qkv [M, (H + 2 G) D], kv_heads = G, q_norm and k_norm [D], cos and sin [P, D/2] in qkv's dtype (rounded before
    use, as Hugging Face does), positions [M] int64 -> q [M, H, D], k [M, G, D], v [M, G, D].
    """
    heads = qkv.unflatten(-1, (-1, q_norm.shape[0]))                        # [M, H + 2 G, D]
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos[positions, None], sin[positions, None]                   # [M, 1, D/2]
    q = rotate_torch(rms_norm_torch(q, q_norm, eps), cos, sin)
    k = rotate_torch(rms_norm_torch(k, k_norm, eps), cos, sin)
    return q, k, v


@jit
def qk_norm_rope_kernel(qkv, out, q_norm, k_norm, cos, sin, positions, eps, stride, heads, q_heads,
                        HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                        EARLY: tl.constexpr):
    """One program norms and rotates BLOCK_HEADS neighbouring heads of one row, q's heads before k's.

    heads = H + G, those that are rotated, and q_heads = H. A head is held as its two halves, [BLOCK_HEADS, D/2] each,
    because RoPE pairs element i with element i + D/2.
    Every product is rounded to the tensor's dtype where torch rounds it.
    """
    take_turn(EARLY)
    dtype = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < heads) & (i < HALF)
    first = tl.load(qkv + row * stride + head * 2 * HALF + i, mask=inside, other=0).to(tl.float32)
    second = tl.load(qkv + row * stride + head * 2 * HALF + HALF + i, mask=inside, other=0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
    norm = tl.where(head < q_heads, q_norm, k_norm)                         # a pointer per head
    weight_first = tl.load(norm + i, mask=inside, other=0).to(tl.float32)
    weight_second = tl.load(norm + HALF + i, mask=inside, other=0).to(tl.float32)
    first = ((first * factor).to(dtype) * weight_first).to(dtype).to(tl.float32)
    second = ((second * factor).to(dtype) * weight_second).to(dtype).to(tl.float32)
    angle = tl.load(positions + row) * HALF + i
    c = tl.load(cos + angle, mask=i < HALF, other=0).to(tl.float32)
    s = tl.load(sin + angle, mask=i < HALF, other=0).to(tl.float32)
    to = out + (row * heads + head) * 2 * HALF + i
    tl.store(to, (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32), mask=inside)
    tl.store(to + HALF, (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32), mask=inside)


def qk_norm_rope_triton(qkv, kv_heads, q_norm, k_norm, cos, sin, positions, eps):
    """As qk_norm_rope_torch, one launch for q and k. q and k are views of one tensor, v is a view of qkv."""
    dim = q_norm.shape[0]
    heads = qkv.shape[1] // dim - kv_heads                                  # H + G
    out = qkv.new_empty(len(qkv), heads, dim)
    # Without fusion: a fused multiply-add would skip a rounding that torch makes, in a quarter of the numbers.
    qk_norm_rope_kernel[(len(qkv), triton.cdiv(heads, 4))](
        qkv, out, q_norm, k_norm, cos, sin, positions, eps, qkv.stride(0), heads, heads - kv_heads,
        dim // 2, triton.next_power_of_2(dim // 2), 4, num_warps=2,
        enable_fp_fusion=False, **early(qkv.device))
    return out[:, :-kv_heads], out[:, -kv_heads:], qkv[:, heads * dim :].unflatten(-1, (kv_heads, dim))


def evidence_logits(window, keys, scale):
    """Raw scaled logits of the newest W queries, each over its own past and -inf beyond it.

    window [W, H, D], newest first: row w is the query of position N - 1 - w; keys [G, N, D] -> [G, R, N] with row
    r = w * H/G + h. A query from before the sequence began (w >= N) sees nothing. SPEC section 3.

        position   0 ........ N-3  N-2  N-1
        w = 0      z           z    z    z          the step's own query
        w = 1      z           z    z  -inf         the one before
        w = 2      z           z  -inf -inf
    """
    heads = window.unflatten(1, (keys.shape[0], -1)).transpose(0, 1)        # [G, W, H/G, D]
    z = heads.flatten(1, 2) @ keys.mT * scale                               # [G, R, N]
    positions = torch.arange(keys.shape[1], device=keys.device)
    own = keys.shape[1] - 1 - torch.arange(window.shape[0], device=keys.device).repeat_interleave(heads.shape[2])
    return z.masked_fill(positions > own[:, None], float("-inf"))


def attend_torch(q, k, v, keys, values, compact_keys, compact_values, plan, scale,
                 key_norms, ring=None, queries=1, logits=None, lse=None, sink=0, recent=0):
    """Store the step's own keys and values, then attend to two segments: compact buffer and a range of the cache.

    q [B, H, D]; k, v [B, G, D]; keys, values [B, G, C, D]; compact_keys, compact_values [B, G, S, D] (None for a
    memory that has no compact buffer: plan's compact is then 0); plan [B, 4]; key_norms [B, G, C] in at least fp32
    -> [B, H, D].
    Written: keys, values and key_norms at end - 1; with `ring` [B, Q, H, D], q at slot (end - 1) % Q.
    With `logits` [B, G, R, C] and `lse` [B, G, R], R = queries * H/G: each slow row's evidence_logits over [0, end),
    the newest query being q and older ones coming from the ring, and their log-sum-exp over the candidates, before
    rounding to logits' dtype; -inf for a row that sees none. SPEC sections 2 and 3.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for b, (compact, start, end, slow) in enumerate(plan.tolist()):
        own = end - 1
        keys[b, :, own], values[b, :, own] = k[b], v[b]
        key_norms[b, :, own] = torch.linalg.vector_norm(k[b], dim=-1, dtype=key_norms.dtype)
        if ring is not None:
            ring[b, own % ring.shape[1]] = q[b]
        mine = q[b].unflatten(0, (-1, group))                               # [G, H/G, D]
        recent_z = mine @ keys[b, :, start:end].mT * scale                  # [G, H/G, end - start]
        if compact:
            z = torch.cat([mine @ compact_keys[b, :, :compact].mT * scale, recent_z], dim=-1)
            p = at_least_fp32(z).softmax(-1).to(q.dtype)
            mixed = p[..., :compact] @ compact_values[b, :, :compact] + p[..., compact:] @ values[b, :, start:end]
        else:
            mixed = at_least_fp32(recent_z).softmax(-1).to(q.dtype) @ values[b, :, start:end]
        out[b] = mixed.flatten(0, 1)
        if logits is not None and slow:
            window = q[b, None] if queries == 1 else ring[b, (own - torch.arange(queries)) % ring.shape[1]]
            z = evidence_logits(window, keys[b, :, :end], scale)            # [G, R, end]
            lo = min(sink, end)
            logits[b, :, :, :end], lse[b] = z, at_least_fp32(z[..., lo : max(lo, end - recent)]).logsumexp(-1)
    return out


@jit
def candidates(plan, b, sink, recent):
    """(slow, lo, hi) of row b: its candidates are positions [lo, hi)."""
    end = tl.load(plan + b * 4 + 2)
    lo = tl.minimum(sink, end)
    return tl.load(plan + b * 4 + 3), lo, tl.maximum(lo, end - recent)


@jit
def exp(x):
    """tl.exp in two instructions instead of five. The price: results below 1e-38 become 0."""
    return tl.exp2(x * LOG2_E)


@jit
def tiles_of(plan, b, inside, BLOCK_N: tl.constexpr):
    """Tiles that each KV head of row (or rows) b reads, its own token left out: at least one, to have a home for it."""
    compact = tl.load(plan + b * 4, mask=inside, other=0)
    start = tl.load(plan + b * 4 + 1, mask=inside, other=0)
    end = tl.load(plan + b * 4 + 2, mask=inside, other=1)
    return tl.maximum(tl.cdiv(compact, BLOCK_N) + tl.cdiv(end - 1 - start, BLOCK_N), 1)


@jit
def share_out(plan, b, B, G, pieces, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """All tiles, those before row b, and the number of pieces: each has at least one tile."""
    rows = tl.arange(0, BLOCK_B)
    tiles = tl.where(rows < B, tiles_of(plan, rows, rows < B, BLOCK_N), 0).to(tl.int64)
    total = G * tl.sum(tiles)
    return total, G * tl.sum(tl.where(rows < b, tiles, 0)), tl.minimum(pieces, total)


@jit
def absorb(query, keys, values, left, best, mass, mixed, scale,
           D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Take one tile of keys and values into a running softmax.

    query [heads, D]; keys and values point to the tile's first slot, of which only `left` are there: a slot beyond is
    never read, for it may hold NaN. best [heads] is the largest logit so far, mass [heads, BLOCK_N] the sums of
    exp(logit - best) by place in the tile, so that warps need not meet for them, mixed [heads, D] the values weighted
    by the same. -> the three brought up to date, and the tile's keys [BLOCK_N, D] and logits [heads, BLOCK_N].
    """
    slot, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at = slot[:, None] * D + d[None, :]
    inside = (slot < left)[:, None] & (d < D)[None, :]
    key = tl.load(keys + at, mask=inside, other=0)
    z = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    z = tl.where((slot < left)[None, :], z, float("-inf"))
    higher = tl.maximum(best, tl.max(z, 1))
    p, fade = exp(z - higher[:, None]), exp(best - higher)
    value = tl.load(values + at, mask=inside, other=0)
    mixed = tl.dot(p.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    return higher, mass * fade[:, None] + p, mixed, key, z


@jit
def absorb_candidates(z, at, lo, hi, best, mass):
    """Take logits z [R, BLOCK_N], at positions `at` [1, BLOCK_N], into running sums over candidates [lo, hi) only.

    best, mass [R, BLOCK_N], by place in the tile. They are apart from absorb's: next to one large logit in the sink,
    all candidates would vanish.
    """
    z = tl.where((lo <= at) & (at < hi), z, float("-inf"))
    fade = exp(-tl.abs(z - best))                                           # of whichever is less
    return tl.maximum(best, z), tl.where(z > best, mass * fade + 1, mass + fade)


@jit
def attend_kernel(q, k, v, keys, values, compact_keys, compact_values, plan, scale, key_norms, ring, logits,
                  partial, partial_lse, partial_candidates, sink, recent, B, G, pieces,
                  q_strides, k_strides, v_strides, key_strides, compact_strides, norm_strides, ring_strides,
                  logit_strides, GROUP: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr,
                  BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
                  BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    """Decode attention: one program works through one piece of all there is to read.

    Lay the tiles of BLOCK_N tokens that every (row, KV head) pair reads on one line, pair after pair, a pair's compact
    tiles before its cache tiles. Cut the line into `pieces` equal pieces, one per program: rows of any kinds and
    lengths share the card evenly, and with equal rows each pair gets a whole number of programs.

        row 0 head 0         row 0 head 1         row 1 head 0   ...
        |CC|NNNNNNNNNNNNNNNN|CC|NNNNNNNNNNNNNNNN|NNNNNNNN|NNN    C: a tile of the compact buffer, N: of the cache
        ^piece 0     ^piece 1     ^piece 2     ^piece 3

    Each key and value is read once, for all query heads of its KV head, padded to BLOCK_H for the matrix units, and for
    the evidence: R = QUERIES * GROUP rows, padded to BLOCK_R, which leave their logits and are not attended with. What
    a piece finds for a pair, `partial` [GROUP, D], the log-sum-exp of its logits, and with `logits` that of each of the
    R rows over the candidates, goes to slot piece + pair, which no other shares. The piece that holds a pair's first
    tile also brings in the step's own token, from k and v, and stores it; no program reads that position from the
    cache, so none can read it too early.
    """
    take_turn(EARLY)
    piece = tl.program_id(0)
    total, before, pieces = share_out(plan, 0, B, G, pieces, BLOCK_B, BLOCK_N)
    low, high = piece * total // pieces, (piece + 1) * total // pieces      # this piece's tiles
    head, r, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    w, h = r // GROUP, r % GROUP                                            # an evidence row's query, head in the group
    real = (head < GROUP)[:, None] & (d < D)[None, :]                       # what is no padding
    place = tl.arange(0, BLOCK_N)[None, :]                                  # in the tile
    for b in range(B if piece < pieces else 0):
        compact, start = tl.load(plan + b * 4), tl.load(plan + b * 4 + 1)
        end, own = tl.load(plan + b * 4 + 2), tl.load(plan + b * 4 + 2) - 1
        slow, lo, hi = candidates(plan, b, sink, recent)
        compact_tiles = tl.cdiv(compact, BLOCK_N)
        tiles = tiles_of(plan, b, True, BLOCK_N)
        for g in range(tl.maximum(low - before, 0) // tiles, tl.minimum(tl.cdiv(high - before, tiles), G)):
            first = tl.maximum(low - before - g * tiles, 0).to(tl.int32)
            last = tl.minimum(high - before - g * tiles, tiles).to(tl.int32)
            its_head = (g * GROUP + head)[:, None]
            query = tl.load(q + offset(q_strides, b, its_head) + d[None, :], mask=real, other=0)
            its_keys, its_values = keys + offset(key_strides, b, g), values + offset(key_strides, b, g)
            best = tl.full([BLOCK_H], float("-inf"), tl.float32)
            mass = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            mixed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
            if logits is not None:
                window = query
                if QUERIES > 1:
                    its_row, slot = (g * GROUP + h)[:, None], ((own - w + SLOTS) % SLOTS)[:, None]
                    newest = tl.load(q + offset(q_strides, b, its_row) + d[None, :], other=0,
                                     mask=(w == 0)[:, None] & (d < D)[None, :])
                    older = tl.load(ring + offset(ring_strides, b, slot, its_row) + d[None, :], other=0,
                                    mask=((w > 0) & (w < QUERIES) & (w <= own))[:, None] & (d < D)[None, :])
                    window = tl.where((w == 0)[:, None], newest, older)
                its_logits = logits + offset(logit_strides, b, g, r[:, None])
                wanted = (r < QUERIES * GROUP)[:, None] & (slow != 0)
                top = tl.full([BLOCK_R, BLOCK_N], -1e30, tl.float32)       # can be subtracted from itself, unlike -inf
                held = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
            if first == 0:
                own_key = tl.load(k + offset(k_strides, b, g) + d, mask=d < D, other=0)
                own_value = tl.load(v + offset(v_strides, b, g) + d, mask=d < D, other=0)
                tl.store(its_keys + own * D + d, own_key, mask=d < D)
                tl.store(its_values + own * D + d, own_value, mask=d < D)
                wide_key = own_key.to(tl.float32)
                tl.store(key_norms + offset(norm_strides, b, g) + own, tl.sqrt(tl.sum(wide_key * wide_key)))
                if ring is not None:
                    tl.store(ring + offset(ring_strides, b, own % SLOTS, its_head) + d[None, :], query, mask=real)
                best = tl.sum(query.to(tl.float32) * wide_key[None, :], 1) * scale
                mass += tl.where(place == 0, 1.0, 0.0)
                mixed += own_value.to(tl.float32)[None, :]
                if logits is not None:
                    z = tl.sum(window.to(tl.float32) * wide_key[None, :], 1) * scale
                    seen = tl.where((w == 0)[:, None] & (place == 0), z[:, None], float("-inf"))
                    tl.store(its_logits + own + place, seen, mask=wanted & (place == 0))
                    top, held = absorb_candidates(seen, own + place, lo, hi, top, held)
            if compact_keys is not None:
                at = offset(compact_strides, b, g)
                for tile in range(first, tl.minimum(last, compact_tiles)):
                    begin = tile * BLOCK_N
                    best, mass, mixed, _, _ = absorb(
                        query, compact_keys + at + begin * D, compact_values + at + begin * D, compact - begin,
                        best, mass, mixed, scale, D, BLOCK_D, BLOCK_N)
            for tile in range(tl.maximum(first, compact_tiles), last):
                position = start + (tile - compact_tiles) * BLOCK_N
                best, mass, mixed, key, z = absorb(
                    query, its_keys + position * D, its_values + position * D, own - position,
                    best, mass, mixed, scale, D, BLOCK_D, BLOCK_N)
                if logits is not None:
                    if QUERIES > 1:
                        z = tl.dot(window, tl.trans(key), input_precision="ieee") * scale
                    seen = tl.where(place < (end - w)[:, None] - position, z, float("-inf"))
                    tl.store(its_logits + position + place, seen, mask=wanted & (place < own - position))
                    top, held = absorb_candidates(seen, position + place, lo, tl.minimum(hi, own), top, held)
            slot, mass = (piece + b * G + g) * GROUP + head, tl.sum(mass, 1)
            tl.store(partial_lse + slot, best + tl.log(mass), mask=head < GROUP)
            tl.store(partial + slot[:, None] * D + d[None, :], mixed / mass[:, None], mask=real)
            if logits is not None:
                slot, highest = (piece + b * G + g) * GROUP * QUERIES + r, tl.max(top, 1)
                held = tl.sum(held * exp(top - highest[:, None]), 1)
                tl.store(partial_candidates + slot, highest + tl.log(held), mask=r < QUERIES * GROUP)
        before += G * tiles


@jit
def combine_kernel(partial, partial_lse, partial_candidates, out, lse, plan, B, G, pieces, GROUP: tl.constexpr,
                   QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr):
    """One program joins what the pieces found for one query head: their mean, weighted by exp(log-sum-exp).

    With `lse` also each of its QUERIES evidence rows' log-sum-exp over the candidates. BLOCK_P pieces at a time.
    """
    b, head = tl.program_id(0), tl.program_id(1)
    g = head // GROUP
    total, before, pieces = share_out(plan, b, B, G, pieces, BLOCK_B, BLOCK_N)
    tiles = tiles_of(plan, b, True, BLOCK_N)
    first = before + g * tiles
    low, high = ((first + 1) * pieces - 1) // total, ((first + tiles) * pieces - 1) // total    # pieces of the ends
    # Before its turn only the plan is read: attend_kernel, right before, has waited before it let this one in, so that
    # whatever wrote the plan has finished.
    take_turn(EARLY)
    d = tl.arange(0, BLOCK_D)
    best, mass, mixed = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    w = tl.arange(0, BLOCK_W)
    top, held = tl.full([BLOCK_W], -1e30, tl.float32), tl.zeros([BLOCK_W], tl.float32)
    for start in range(low, high + 1, BLOCK_P):
        piece = start + tl.arange(0, BLOCK_P)
        slot = (piece + b * G + g) * GROUP + head % GROUP
        its_lse = tl.load(partial_lse + slot, mask=piece <= high, other=float("-inf"))
        found = tl.load(partial + slot[:, None] * D + d[None, :], other=0,
                        mask=(piece <= high)[:, None] & (d < D)[None, :])
        higher = tl.maximum(best, tl.max(its_lse))
        weight, fade = tl.exp(its_lse - higher), tl.exp(best - higher)
        mass = mass * fade + tl.sum(weight)
        mixed = mixed * fade + tl.sum(found * weight[:, None], 0)
        best = higher
        if lse is not None:
            slot = ((piece + b * G + g)[:, None] * QUERIES + w[None, :]) * GROUP + head % GROUP
            row = tl.load(partial_candidates + slot, mask=(piece <= high)[:, None] & (w < QUERIES)[None, :],
                          other=float("-inf"))
            higher = tl.maximum(top, tl.max(row, 0))
            held = held * exp(top - higher) + tl.sum(exp(row - higher[None, :]), 0)
            top = higher
    tl.store(out + (b * G * GROUP + head) * D + d, mixed / mass, mask=d < D)
    if lse is not None:
        row = ((b * G + g) * QUERIES + w) * GROUP + head % GROUP
        tl.store(lse + row, top + tl.log(held), mask=(w < QUERIES) & (tl.load(plan + b * 4 + 3) != 0))


def attend_tile(pairs, tokens, kind, rows, block_d, itemsize, device):
    """(tokens of a tile, warps, stages, pieces) of decode attention; pairs = B G, tokens = the most a pair reads.

    kind is "fast", "dense" or "logits", a dense step that stores its logits; rows, padded, of queries. Two programs
    with tiles of 64 share a multiprocessor; few pairs' long reads go to tiles of 128, one program per multiprocessor.
    Measured on one H200 in bf16 by bench/kernels.py, microseconds with tiles of 64 and 128: dense at batch 1 and 128K
    128 and 127, at batch 8 and 32K 246 and 247; with the logits of 8 queries of 32 heads at batch 6 and 128K 901, with
    twice the pieces 915. More rows get smaller tiles, so that tests/compile_kernels.py finds no spills in the loop.
    Raises ValueError where even the smallest tile does not fit.
    """
    processors, shared = card(device)
    large = kind == "dense" and pairs <= processors // 4
    most = 128 if large else 64
    if kind == "logits" and (itemsize > 2 or rows >= 80):                   # or registers run out in the loop
        most = 32 if rows < 144 else 16
    warps = 4 if rows * block_d * itemsize < 2**14 else 8
    for block_n, stages in (most, 3), (64, 3), (64, 2), (32, 2), (16, 2):
        buffers = stages - 1 if rows < 64 else stages                       # of keys and of values, in shared memory
        if block_n <= most and 2 * (buffers * block_n + rows) * block_d * itemsize <= shared:
            break
    else:                                                                   # that was generous; this is the least
        if (rows + 48) * block_d * itemsize > shared:
            raise ValueError(f"{rows} rows of queries do not fit on this card: fewer evidence_queries would")
    pieces = 2 * processors
    if large:                                                               # a whole number for each pair
        pieces = pairs * (processors // pairs)
    elif kind == "fast":
        pieces = pairs * max(1, min(2 * processors // pairs, 16))
    return block_n, warps, stages, min(pieces, pairs * triton.cdiv(tokens, block_n))


def padded(rows):
    """Rows of a tile that holds `rows`: the matrix units want at least 16."""
    return max(16, triton.next_power_of_2(rows))


def strides(x):
    """The strides of x, or None where there is no x."""
    return None if x is None else x.stride()


def launch_attend(tile, q, k, v, keys, values, compact_keys, compact_values, plan, scale, key_norms, ring, queries,
                  logits, lse, sink, recent):
    """As attend_torch, by attend_kernel and combine_kernel with a tile of attend_tile."""
    (B, H, D), G = q.shape, k.shape[1]
    block_n, warps, stages, pieces = tile
    group, block_d = H // G, triton.next_power_of_2(max(D, 16))
    partial, partial_lse, partial_candidates = (
        q.new_empty(pieces + B * G, *shape, dtype=torch.float32)
        for shape in ((group, D), (group,), (queries * group,)))
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    block_b = triton.next_power_of_2(B)
    block_p = min(64, max(16, triton.next_power_of_2(pieces // (B * G))))   # a second round would cost 2.5 us
    attend_kernel[(pieces,)](
        q, k, v, keys, values, compact_keys, compact_values, plan, scale, key_norms, ring, logits,
        partial, partial_lse, partial_candidates, sink, recent, B, G, pieces,
        strides(q), strides(k), strides(v), strides(keys), strides(compact_keys),
        strides(key_norms), strides(ring), strides(logits), group, queries, 0 if ring is None else ring.shape[1], D,
        padded(group), padded(queries * group), block_d, block_b, block_n,
        num_warps=warps, num_stages=stages, **early(q.device))
    combine_kernel[(B, H)](partial, partial_lse, partial_candidates, out, lse, plan, B, G, pieces, group, queries, D,
                           block_d, block_b, block_n, block_p, triton.next_power_of_2(queries), **early(q.device))
    return out


def attend_triton(q, k, v, keys, values, compact_keys, compact_values, plan, scale,
                  key_norms, ring=None, queries=1, logits=None, lse=None, sink=0, recent=0):
    """As attend_torch, in two launches. keys and values must have the same strides, and so must the compact buffers;
    lse must be contiguous.

    A slow row's plan must be dense, (0, 0, N, 1). The step is taken for a fast one, which only decides how the work
    is cut, where there is a compact buffer and no logits are asked for.
    """
    B, _, D = q.shape
    kind = "logits" if logits is not None else "dense" if compact_keys is None else "fast"
    queries = queries if logits is not None else 1                          # nobody asks for the older queries' logits
    group = q.shape[1] // k.shape[1]
    rows = padded(group) + padded(queries * group) * (queries > 1)          # attended with, and for evidence only
    tile = attend_tile(B * k.shape[1], keys.shape[2], kind, rows, triton.next_power_of_2(max(D, 16)),
                       q.element_size(), q.device)
    return launch_attend(tile, q, k, v, keys, values, compact_keys, compact_values, plan, scale, key_norms, ring,
                         queries, logits, lse, sink, recent)


def rebuild(full, compact, lo, chosen):
    """Copy the sink [0, lo), then the chosen positions. full [G, C, D], chosen [G, count] -> into compact [G, S, D]."""
    compact[:, :lo] = full[:, :lo]
    compact[:, lo : lo + chosen.shape[-1]] = full.gather(1, chosen[..., None].expand(-1, -1, full.shape[-1]))


def publish_torch(logits, lse, key_norms, keys, values, plan, sink, recent, config,
                  positions, compact_keys, compact_values):
    """Select for every slow row of n layers and rebuild its compact buffer: sink first, then selected, ascending.

    logits [n, B, G, R, C]; lse [n, B, G, R], as attend_torch leaves it, though `select` finds it anew;
    key_norms [n, B, G, C]; keys, values [n, B, G, C, D]; plan [B, 4], of which `end` and `slow` are read; config a
    SelectorConfig. Written, slow rows only: positions [n, B, G, K] int64 (the first min(K, candidates) count),
    compact_keys and compact_values [n, B, G, sink + K, D]. SPEC sections 2 and 5.
    """
    for b, (_, _, end, slow) in enumerate(plan.tolist()):
        if not slow:
            continue
        lo = min(sink, end)
        hi = max(lo, end - recent)
        for layer in range(logits.shape[0]):
            chosen = select(logits[layer, b, ..., :end], key_norms[layer, b, :, :end], lo, hi,
                            positions.shape[-1], config).positions          # [G, min(K, hi - lo)]
            positions[layer, b, :, : chosen.shape[-1]] = chosen
            for full, compact in ((keys, compact_keys), (values, compact_values)):
                rebuild(full[layer, b], compact[layer, b], lo, chosen)


@jit
def place_kernel(plan, place, sink, recent, C, w_position, beta, power, eta, eps, BLOCK: tl.constexpr):
    """The part of the prior that all layers and heads of a row share: w_pos (-beta x^power + eta ln max(1 - x, eps)).

    -inf outside the candidates.
    """
    b = tl.program_id(0)
    _, lo, hi = candidates(plan, b, sink, recent)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = 1.0 / tl.maximum(hi - lo - 1, 1).to(tl.float32)
    x, rest = (at - lo).to(tl.float32) * scale, (hi - 1 - at).to(tl.float32) * scale    # rest is 1 - x, exact near 0
    rest = tl.where(hi - lo > 1, rest, 1.0)
    curve = tl.where(x > 0, tl.exp2(power * tl.log2(tl.maximum(x, 1e-30))), tl.where(power == 0, 1.0, 0.0))
    log_r = w_position * (-beta * curve + eta * tl.log(tl.maximum(rest, eps)))
    tl.store(place + b * C + at, tl.where((lo <= at) & (at < hi), log_r, float("-inf")), mask=at < C)


@jit
def evidence_kernel(logits, lse, key_norms, place, plan, log_f, log_r, sums, sink, recent, B, G, R, C, parts, strides,
                    norm_strides, lean, eps, ALPHA: tl.constexpr, BLOCK_R: tl.constexpr, PART: tl.constexpr):
    """One program joins the R rows of one KV head over one part, and finds its prior: log f and log r, not normalised.

    The rows come BLOCK_R at a time, laid out so that a thread holds all of a position's and joins them by itself.
    All up to C is loaded, because that goes in wide loads; what is no candidate is dropped afterwards. -1e30 stands
    for "nothing seen yet": unlike -inf it can be subtracted from itself. Besides, for the closed form of lambda,
    sums over the part of f, f f, r, r r and f r, each relative to the largest f and r of the part. `sums` [cells,
    parts, 8]: max f, f, f f, max r, r, r r, f r, the number of rows that see.
    """
    cell, part = tl.program_id(0).to(tl.int64), tl.program_id(1)            # cell = (layer, b, g)
    g, b, layer = cell % G, cell // G % B, cell // G // B
    slow, lo, hi = candidates(plan, b, sink, recent)
    if slow == 0:
        return
    at = part * PART + tl.arange(0, PART)
    inside = (lo <= at) & (at < hi)
    logits += offset(strides, layer, b, g)
    rows = 0
    peak, total = tl.full([PART], -1e30, tl.float32), tl.zeros([PART], tl.float32)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)[:, None]
        z = tl.load(logits + tl.cast(r, tl.int64) * strides[3] + at[None, :], mask=(r < R) & (at < C)[None, :], other=0)
        its_lse = tl.load(lse + cell * R + r, mask=r < R, other=float("-inf"))
        sees = its_lse > float("-inf")                                      # a row that sees no candidate is left out
        rows += tl.sum(sees.to(tl.int32))
        its_lse = tl.where(sees, its_lse, float("inf"))
        if ALPHA == 0:
            total += tl.sum(tl.where(sees, z.to(tl.float32) - its_lse, 0), 0)
        else:                                                               # in base 2: a multiply and an add per logit
            log_p = z.to(tl.float32) * (ALPHA * LOG2_E) - its_lse * (ALPHA * LOG2_E)
            higher = tl.maximum(peak, tl.max(log_p, 0))
            total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(log_p - higher[None, :]), 0)
            peak = higher
    if ALPHA == 0:
        log_e = total / tl.maximum(rows, 1)
    else:
        log_e = (peak + tl.log2(total)) / (ALPHA * LOG2_E)
    log_e = tl.where(inside, log_e, float("-inf"))
    norm = tl.load(key_norms + offset(norm_strides, layer, b, g) + at, mask=at < C, other=1)
    log_prior = tl.load(place + b * C + at, mask=at < C, other=float("-inf"))
    log_prior -= lean * tl.log(tl.maximum(tl.where(inside, norm, 1), eps))
    tl.store(log_f + cell * C + at, log_e, mask=at < C)
    tl.store(log_r + cell * C + at, log_prior, mask=at < C)
    max_f, max_r = tl.maximum(tl.max(log_e), -1e30), tl.maximum(tl.max(log_prior), -1e30)
    f, prior = exp(log_e - max_f), exp(log_prior - max_r)
    to = sums + (cell * parts + part) * 8
    tl.store(to, max_f)
    tl.store(to + 1, tl.sum(f))
    tl.store(to + 2, tl.sum(f * f))
    tl.store(to + 3, max_r)
    tl.store(to + 4, tl.sum(prior))
    tl.store(to + 5, tl.sum(prior * prior))
    tl.store(to + 6, tl.sum(f * prior))
    tl.store(to + 7, rows.to(tl.float32))


@jit
def mix_kernel(plan, sums, lam_out, mix, sink, recent, B, G, parts, cap_single, cap_multi, BLOCK_P: tl.constexpr):
    """One program finds lambda of its KV head from the sums of all parts.

    mix [cells, 3]: log s = logaddexp(log f + mix 0, log r + mix 1), where log f counts as 0 if mix 2 is set: no row
    sees a candidate, and the evidence is flat.
    """
    cell = tl.program_id(0).to(tl.int64)                                    # (layer, b, g)
    slow, lo, hi = candidates(plan, cell // G % B, sink, recent)
    if slow == 0:
        return
    p = tl.arange(0, BLOCK_P)
    of = sums + (cell * parts + p) * 8
    top_f, top_r = tl.load(of, mask=p < parts, other=-1e30), tl.load(of + 3, mask=p < parts, other=-1e30)
    max_f, max_r = tl.max(top_f), tl.max(top_r)
    fade_f, fade_r = exp(top_f - max_f), exp(top_r - max_r)
    f = tl.sum(tl.load(of + 1, mask=p < parts, other=0) * fade_f)
    ff = tl.sum(tl.load(of + 2, mask=p < parts, other=0) * fade_f * fade_f)
    r = tl.sum(tl.load(of + 4, mask=p < parts, other=0) * fade_r)
    rr = tl.sum(tl.load(of + 5, mask=p < parts, other=0) * fade_r * fade_r)
    fr = tl.sum(tl.load(of + 6, mask=p < parts, other=0) * fade_f * fade_r)
    rows = tl.load(sums + cell * parts * 8 + 7)
    flat = f == 0                                                           # no row sees a candidate
    number = (hi - lo).to(tl.float32)                                       # of candidates
    max_f, f = tl.where(flat, 0, max_f), tl.where(flat, number, f)
    ff, fr = tl.where(flat, number, ff), tl.where(flat, r, fr)
    ff, fr, rr = ff / (f * f), fr / (f * r), rr / (r * r)                   # inner products of normalised f and r
    square = ff - 2 * fr + rr
    lam = tl.where(square > 0, (ff - fr) / square, 0)
    lam = tl.minimum(tl.maximum(lam, 0), tl.where(rows > 1, cap_multi, cap_single))
    tl.store(lam_out + cell, lam)
    tl.store(mix + cell * 3, tl.log(1 - lam) - max_f - tl.log(f))
    tl.store(mix + cell * 3 + 1, tl.log(lam) - max_r - tl.log(r))
    tl.store(mix + cell * 3 + 2, flat.to(tl.float32))


@jit
def fuse_kernel(plan, mix, log_f, log_s, sink, recent, B, G, C, BLOCK: tl.constexpr):
    """One program mixes evidence and prior of BLOCK positions of one KV head, in the place of log r.

    -inf outside the candidates.
    """
    cell = tl.program_id(0).to(tl.int64)                                    # (layer, b, g)
    slow, lo, hi = candidates(plan, cell // G % B, sink, recent)
    if slow == 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_e = tl.load(log_f + cell * C + at, mask=at < C, other=0)
    log_r = tl.load(log_s + cell * C + at, mask=at < C, other=0)
    one = tl.load(mix + cell * 3) + tl.where(tl.load(mix + cell * 3 + 2) > 0, 0, log_e)
    other = tl.load(mix + cell * 3 + 1) + log_r
    high, low = tl.maximum(one, other), tl.minimum(one, other)
    seen = (lo <= at) & (at < hi) & (high > float("-inf"))
    mixed = tl.where(seen, high + tl.log(1 + exp(low - high)), float("-inf"))
    tl.store(log_s + cell * C + at, mixed, mask=at < C)


@jit
def larger(a, b):
    return tl.maximum(a, b)


@jit
def load_scores(scores, at, inside, C):
    return tl.load(scores + at, mask=inside & (0 <= at) & (at < C), other=float("-inf"))


@jit
def positions_of(block, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    """Positions [1, BLOCKS, HALF] of a program of compete_kernel or spread_kernel."""
    return (block * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]) * HALF + tl.arange(0, HALF)[None, None, :]


@jit
def window_max(scores, at, inside, C, REACH: tl.constexpr, HALF: tl.constexpr):
    """The maximum within +-REACH of each position of `at` [heads, blocks, HALF]; scores are -inf beyond the candidates.

    `at` counts on along its last two axes, in blocks of HALF, a power of two. The window +-HALF of the position at
    place j in its block is the previous block from j on, the whole block, and the next block up to j: two running
    maxima and one maximum. A longer reach takes several such windows side by side.

        previous     own          next
        |....######|##########|#####.....|
    """
    best = tl.full(at.shape, float("-inf"), tl.float32)
    for i in range((2 * REACH + 2 * HALF + 1) // (2 * HALF + 1)):
        centre = at + tl.minimum(i * (2 * HALF + 1) - (REACH - HALF), REACH - HALF)
        previous = load_scores(scores, centre - HALF, inside, C)
        following = load_scores(scores, centre + HALF, inside, C)
        best = tl.maximum(best, tl.max(load_scores(scores, centre, inside, C), 2)[:, :, None])
        best = tl.maximum(best, tl.associative_scan(previous, 2, larger, reverse=True))
        best = tl.maximum(best, tl.associative_scan(following, 2, larger))
    return best


@jit
def store_extent(extent, scores, inside, made):
    """Leave the least and the largest of those scores [heads, blocks, HALF] that are `inside`, for narrow_kernel."""
    tl.store(extent, tl.min(tl.min(tl.where(inside, scores, float("inf")), 2), 1), mask=made)
    tl.store(extent + 1, tl.max(tl.max(tl.where(inside, scores, float("-inf")), 2), 1), mask=made)


@jit
def compete_kernel(log_s, plan, scores, extent, sink, recent, B, G, C, blocks, nms_alpha, exclusivity_alpha,
                   temperature, log_eps, REACH: tl.constexpr, HALF: tl.constexpr, BLOCK_G: tl.constexpr,
                   BLOCKS: tl.constexpr):
    """One program takes BLOCKS * HALF positions of all KV heads of one layer through soft-NMS and exclusivity.

    -inf outside the candidates; a candidate is at least -3e38, so that even one that no row sees ranks before what is
    no candidate. `extent` [cells, blocks, 2]: each block's least and largest score.
    """
    cell = tl.program_id(0).to(tl.int64)                                    # (layer, b)
    slow, lo, hi = candidates(plan, cell % B, sink, recent)
    if slow == 0:
        return
    g = tl.arange(0, BLOCK_G)[:, None, None]
    at = positions_of(tl.program_id(1), BLOCKS, HALF)
    head = (cell * G + g) * C
    s = load_scores(log_s + head, at, g < G, C)
    if REACH > 0:
        best = window_max(log_s + head, at + tl.zeros_like(g), g < G, C, REACH, HALF)
        s = tl.where(s == float("-inf"), s, s - nms_alpha * (best - s))
    scaled = s / temperature
    peak = tl.maximum(tl.max(scaled, 0), -1e30)[None, :, :]
    log_share = scaled - peak - tl.log(tl.sum(exp(scaled - peak), 0))[None, :, :]
    s = tl.where(s == float("-inf"), s, s + exclusivity_alpha * tl.maximum(log_share, log_eps))
    s = tl.where((lo <= at) & (at < hi), tl.maximum(s, -3e38), float("-inf"))
    tl.store(scores + head + at, s, mask=(g < G) & (at < C))
    heads = tl.arange(0, BLOCK_G)
    store_extent(extent + ((cell * G + heads) * blocks + tl.program_id(1)) * 2, s, (lo <= at) & (at < hi), heads < G)


@jit
def spread_kernel(scores, plan, out, extent, sink, recent, B, G, C, blocks, REACH: tl.constexpr, HALF: tl.constexpr,
                  BLOCKS: tl.constexpr):
    """One program spreads BLOCKS * HALF scores of one KV head. out in float64, see selector.spread; extent as above."""
    cell = tl.program_id(0).to(tl.int64)                                    # (layer, b, g)
    slow, lo, hi = candidates(plan, cell // G % B, sink, recent)
    if slow == 0:
        return
    at = positions_of(tl.program_id(1), BLOCKS, HALF)
    s = load_scores(scores + cell * C, at, True, C).to(tl.float64)
    best = window_max(scores + cell * C, at, True, C, REACH, HALF).to(tl.float64)
    s = tl.where((lo <= at) & (at < hi), best + 1e-6 * s, float("-inf"))
    tl.store(out + cell * C + at, s, mask=at < C)
    head = cell + tl.arange(0, 1)
    store_extent(extent + (head * blocks + tl.program_id(1)) * 2, s, (lo <= at) & (at < hi), head == cell)


@jit
def sortable(score):
    """A score's bits as an integer that orders as scores do."""
    score += 0.0                                                            # -0 + 0 is 0
    if score.dtype == tl.float64:
        bits = score.to(tl.int64, bitcast=True)
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = score.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def narrow_kernel(scores, extent, plan, state, next_state, counts, next_counts, own, tally, sink, recent, B, G, C, K,
                  parts, blocks, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK_E: tl.constexpr,
                  PART: tl.constexpr):
    """One round of the search for the K-th best score of each KV head; a program counts one part of one head.

    Known is a bracket of sortable scores, low to last, how many it holds, and how many of these are wanted, best
    first; in the FIRST round the bracket is all candidates. A round cuts the bracket into 32 bins of 2^shift and
    counts what falls into each. The next one goes on with the bin that the K-th best is in, and notes in `tally` how
    many of its own part lie above that bin and in it: a part that has none in it is not read again. Once all that a
    bracket holds is wanted the search is over.

        low |......|..........|.......|########|###| last       bins, and what each holds
                                 wanted: |--- K ---|             the K-th best is in the third: on with that one

    state [cells, 5] int64: low, last, held, wanted, shift; counts [cells, 32], zeros at first; own [cells, parts, 32],
    what a part has counted; tally [cells, parts, 2]. Without COUNT the round only adds up. state and counts are not
    written where they are read, for other programs still read them.
    """
    cell, part = tl.program_id(0).to(tl.int64), tl.program_id(1)            # cell = (layer, b, g)
    slow, lo, hi = candidates(plan, cell // G % B, sink, recent)
    if slow == 0:
        return
    bin = tl.arange(0, 32)
    its_own, its_tally = own + (cell * parts + part) * 32 + bin, tally + (cell * parts + part) * 2
    if FIRST:
        block = tl.arange(0, BLOCK_E)
        of = extent + (cell * blocks + block) * 2
        least = tl.min(tl.load(of, mask=block < blocks, other=float("inf")))
        most = tl.max(tl.load(of + 1, mask=block < blocks, other=float("-inf")))
        low, last = sortable(least).to(tl.int64), sortable(most).to(tl.int64)
        wanted = tl.minimum(K, hi - lo).to(tl.int64)
        held = tl.where(wanted > 0, hi - lo, 0).to(tl.int64)
        here = tl.maximum(tl.minimum(hi, part * PART + PART) - tl.maximum(lo, part * PART), 0)
        width = (last - low).to(tl.uint64, bitcast=True)
        bits = tl.sum(((width >> tl.arange(0, 64).to(tl.uint64)) != 0).to(tl.int64))
        shift = tl.maximum(bits - 5, 0)
        tl.store(its_tally, 0)
        tl.store(its_tally + 1, here)
    else:
        low, last = tl.load(state + cell * 5), tl.load(state + cell * 5 + 1)
        held, wanted = tl.load(state + cell * 5 + 2), tl.load(state + cell * 5 + 3)
        shift = tl.load(state + cell * 5 + 4)
        here = tl.load(its_tally + 1)
        if wanted < held:
            count = tl.load(counts + cell * 32 + bin)
            reached = tl.cumsum(count, 0, reverse=True)
            chosen = tl.sum(tl.where((reached - count < wanted) & (wanted <= reached), bin, 0))
            if here > 0:
                mine = tl.load(its_own)
                here = tl.sum(tl.where(bin == chosen, mine, 0))
                tl.store(its_tally, tl.load(its_tally) + tl.sum(tl.where(bin > chosen, mine, 0)))
                tl.store(its_tally + 1, here)
            wanted -= tl.sum(tl.where(bin > chosen, count, 0))
            held = tl.sum(tl.where(bin == chosen, count, 0)).to(tl.int64)
            low += chosen.to(tl.int64) << shift
            width = tl.minimum((last - low).to(tl.uint64, bitcast=True), (tl.full([], 1, tl.uint64) << shift) - 1)
            last = low + width.to(tl.int64, bitcast=True)
            shift = tl.maximum(shift - 5, 0)
    if part == 0:
        tl.store(next_state + cell * 5, low)
        tl.store(next_state + cell * 5 + 1, last)
        tl.store(next_state + cell * 5 + 2, held)
        tl.store(next_state + cell * 5 + 3, wanted)
        tl.store(next_state + cell * 5 + 4, shift)
    if COUNT:
        if (wanted < held) & (here > 0):
            at = part * PART + tl.arange(0, PART)
            key = sortable(tl.load(scores + cell * C + at, mask=at < C, other=float("-inf")))
            unsigned = tl.uint32 if key.dtype == tl.int32 else tl.uint64
            beyond = (key - low.to(key.dtype)).to(unsigned, bitcast=True)   # a key below low comes out beyond last
            bins = tl.histogram((beyond >> shift).to(tl.int32), 32, mask=beyond <= (last - low).to(unsigned))
            tl.store(its_own, bins)
            tl.atomic_add(next_counts + cell * 32 + bin, bins)


@jit
def choose_kernel(scores, plan, state, tally, positions, sink, recent, B, G, C, parts, position_strides,
                  BLOCK_P: tl.constexpr, PART: tl.constexpr):
    """One program writes the selected positions of one part where they belong: ascending, of equal scores the first.

    The tallies of the parts before it say how many come before its own.
    """
    cell, part = tl.program_id(0).to(tl.int64), tl.program_id(1)            # cell = (layer, b, g)
    g, b, layer = cell % G, cell // G % B, cell // G // B
    slow, lo, hi = candidates(plan, b, sink, recent)
    if slow == 0:
        return
    low, last = tl.load(state + cell * 5), tl.load(state + cell * 5 + 1)
    held, wanted = tl.load(state + cell * 5 + 2), tl.load(state + cell * 5 + 3)
    p = tl.arange(0, BLOCK_P)
    above = tl.sum(tl.load(tally + (cell * parts + p) * 2, mask=p < part, other=0))
    equal = tl.sum(tl.load(tally + (cell * parts + p) * 2 + 1, mask=p < part, other=0))
    at = part * PART + tl.arange(0, PART)
    key = sortable(tl.load(scores + cell * C + at, mask=at < C, other=float("-inf")))
    keep = (wanted > 0) & (low.to(key.dtype) <= key)
    if wanted < held:                                                       # of equal scores, not all
        ties = keep & (key <= last.to(key.dtype))
        keep = keep & ((key > last.to(key.dtype)) | (equal + tl.cumsum(ties.to(tl.int32), 0) <= wanted))
    slot = above + tl.minimum(equal, wanted) + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(positions + offset(position_strides, layer, b, g) + slot, at, mask=keep)


@jit
def gather_kernel(positions, keys, values, plan, compact_keys, compact_values, sink, recent, B, G, K,
                  position_strides, key_strides, compact_strides, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK: tl.constexpr):
    """One program fills BLOCK slots of one KV head's compact buffer: each key and value is read and written once.

    Slots [0, lo) hold the sink, the next min(K, hi - lo) the selected tokens; the rest stay as they are.
    """
    cell = tl.program_id(0).to(tl.int64)                                    # (layer, b, g)
    g, b, layer = cell % G, cell // G % B, cell // G // B
    slow, lo, hi = candidates(plan, b, sink, recent)
    if slow == 0:
        return
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    selected = (lo <= slot) & (slot < lo + tl.minimum(K, hi - lo))
    position = tl.load(positions + offset(position_strides, layer, b, g) + slot - lo, mask=selected, other=0)
    position = tl.where(slot < lo, slot, position)
    d = tl.arange(0, BLOCK_D)
    inside = (selected | (slot < lo))[:, None] & (d < D)[None, :]
    source = offset(key_strides, layer, b, g) + position[:, None] * D + d[None, :]
    target = offset(compact_strides, layer, b, g) + slot[:, None] * D + d[None, :]
    tl.store(compact_keys + target, tl.load(keys + source, mask=inside, other=0), mask=inside)
    tl.store(compact_values + target, tl.load(values + source, mask=inside, other=0), mask=inside)


def window_tile(reach):
    """The largest power of two within reach, at most 256: the block of window_max."""
    return min(1 << max(reach, 1).bit_length() - 1, 256)


class Scores(NamedTuple):
    """Every stage of select, [n, B, G, C] but lam [n, B, G] and the `extent` [n, B, G, blocks, 2] of log_spread.

    log_evidence is not normalised. What is no candidate is -inf in every stage; a candidate that no row sees has about
    -3e38 in log_exclusive and log_spread. Rows that are not slow are not written.
    """
    log_evidence: torch.Tensor
    lam: torch.Tensor
    log_fused: torch.Tensor
    log_exclusive: torch.Tensor
    log_spread: torch.Tensor
    extent: torch.Tensor


def scores_triton(logits, lse, key_norms, plan, sink, recent, config):
    """Every stage of select for the slow rows of n layers, over all positions -> Scores.

    Arguments as publish_torch's. Sizes of parts were measured, here and in top_triton: bench/results/EXPERIMENTS.md.
    """
    n, B, G, R, C = logits.shape
    size = 1024
    parts = triton.cdiv(C, size)
    place, sums, lam, mix = (torch.empty(shape, dtype=torch.float32, device=logits.device)
                             for shape in ((B, C), (n, B, G, parts, 8), (n, B, G), (n, B, G, 3)))
    log_f, log_s, scores = (torch.empty(n, B, G, C, dtype=torch.float32, device=logits.device) for _ in range(3))
    place_kernel[(B, parts)](
        plan, place, sink, recent, C, float(config.weight_position), -math.log(config.theta) / config.p,
        float(config.position_power), float(config.position_eta), config.eps, size)
    evidence_kernel[(n * B * G, parts)](
        logits, lse.contiguous(), key_norms, place, plan, log_f, log_s, sums, sink, recent, B, G, R, C, parts,
        logits.stride(), key_norms.stride(), float(config.weight_norm * config.gamma), config.eps, config.alpha,
        min(4, triton.next_power_of_2(R)), size)
    mix_kernel[(n * B * G,)](plan, sums, lam, mix, sink, recent, B, G, parts, config.lambda_cap_single,
                             config.lambda_cap_multi, triton.next_power_of_2(parts))
    fuse_kernel[(n * B * G, parts)](plan, mix, log_f, log_s, sink, recent, B, G, C, size)
    reach = min(config.nms_window // 2, C)
    half, block_g = window_tile(reach), triton.next_power_of_2(G)
    per_program = max(1, min(2048 // block_g, triton.next_power_of_2(C)) // half) * half
    blocks = triton.cdiv(C, per_program)
    extent = torch.empty(n, B, G, blocks, 2, dtype=torch.float32, device=logits.device)
    compete_kernel[(n * B, blocks)](
        log_s, plan, scores, extent, sink, recent, B, G, C, blocks, config.nms_alpha, config.exclusivity_alpha,
        config.exclusivity_temperature, math.log(config.eps), reach, half, block_g, per_program // half)
    if not config.spread:
        return Scores(log_f, lam, log_s, scores, scores, extent)
    reach = min(config.spread, C)
    half = window_tile(reach)
    per_program = max(1, min(1024, triton.next_power_of_2(C)) // half) * half
    blocks = triton.cdiv(C, per_program)
    spread, extent = (torch.empty(n, B, G, *shape, dtype=torch.float64, device=logits.device)
                      for shape in ((C,), (blocks, 2)))
    spread_kernel[(n * B * G, blocks)](scores, plan, spread, extent, sink, recent, B, G, C, blocks, reach, half,
                                       per_program // half)
    return Scores(log_f, lam, log_s, scores, spread, extent)


def top_triton(scores, extent, plan, sink, recent, positions):
    """Write the K best candidates of each KV head's slow rows, ascending, into positions [n, B, G, K] int64.

    scores [n, B, G, C] float32 or float64, finite for candidates and -inf for all else; extent [n, B, G, blocks, 2],
    the candidates' least and largest, block by block.
    """
    n, B, G, C = scores.shape
    size, bits, cells, blocks = 4096, 8 * scores.element_size(), n * B * G, extent.shape[3]
    parts, rounds = triton.cdiv(C, size), triton.cdiv(bits, 5)
    state, own, tally = (torch.empty(shape, dtype=dtype, device=scores.device) for shape, dtype in (
        ((rounds + 2, cells, 5), torch.int64), ((cells, parts, 32), torch.int32), ((cells, parts, 2), torch.int32)))
    counts = torch.zeros(rounds + 1, cells, 32, dtype=torch.int32, device=scores.device)
    for turn in range(rounds + 1):
        narrow_kernel[(cells, parts)](
            scores, extent, plan, state[turn], state[turn + 1], counts[turn - 1], counts[turn], own, tally, sink,
            recent, B, G, C, positions.shape[-1], parts, blocks, turn == 0, turn < rounds,
            triton.next_power_of_2(blocks), size)
    choose_kernel[(cells, parts)](scores, plan, state[-1], tally, positions, sink, recent, B, G, C, parts,
                                  positions.stride(), triton.next_power_of_2(parts), size, num_warps=8)


def publish_triton(logits, lse, key_norms, keys, values, plan, sink, recent, config,
                   positions, compact_keys, compact_values):
    """As publish_torch, without a look at the plan from the host: it can be captured in a graph.

    Every launch serves all layers and rows at once. keys and values must have the same strides, and so must the
    compact buffers.
    """
    n, B, G = logits.shape[:3]
    K, D, slots = positions.shape[-1], keys.shape[-1], compact_keys.shape[-2]
    scores = scores_triton(logits, lse, key_norms, plan, sink, recent, config)
    top_triton(scores.log_spread, scores.extent, plan, sink, recent, positions)
    gather_kernel[(n * B * G, triton.cdiv(slots, 32))](
        positions, keys, values, plan, compact_keys, compact_values, sink, recent, B, G, K,
        positions.stride(), keys.stride(), compact_keys.stride(), D, triton.next_power_of_2(D), 32)


@dataclass(frozen=True)
class Ops:
    """The functions of a step, and of the bootstrap selection. Prefill's attention is torch on every device."""
    rms_norm: Callable
    linear: Callable
    swiglu: Callable
    qk_norm_rope: Callable
    attend: Callable
    publish: Callable


TORCH = Ops(rms_norm_torch, linear_torch, swiglu_torch, qk_norm_rope_torch, attend_torch, publish_torch)
TRITON = triton and Ops(rms_norm_triton, linear_triton, swiglu_triton, qk_norm_rope_triton, attend_triton,
                        publish_triton)
