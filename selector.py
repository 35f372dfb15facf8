"""The Selector: from raw attention logits to the positions a KV head keeps, one small function per stage.

`select` runs the stages in the paper's order. Each stage needs only its own inputs, so that any one of them can be
checked alone. Beside it stand the numbers that say how stable a selection is. This file knows nothing of tokens,
sentences, caches or checkpoints, and keeps no state.
Paper: the Selector and its fusion of evidence and prior; the overlap of supports. SPEC sections 5 and 7.

Symbols: G KV heads, R evidence rows of one KV head, N cached tokens, candidates [lo, hi), n = hi - lo. Everything is
computed in at least fp32, in natural logarithms, and any leading batch dimensions `...` pass through. `scores` are
the log s that stages 4 to 7 change; a score of -inf belongs to a position that no row sees, and stays -inf.
"""
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F

NEVER = float("-inf")


def check_knobs(config, ranges):
    """ValueError, naming the knob, if one is no number of its field's type or not in its range; [0, 1000] if none."""
    for knob in fields(config):
        if knob.type not in (int, float):
            continue
        value, (low, high) = getattr(config, knob.name), ranges.get(knob.name, (0, 1000))
        kind, number = (int, "an integer") if knob.type is int else ((int, float), "a number")
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise ValueError(f"{knob.name} must be {number} in [{low}, {high}], not {value!r}")


@dataclass(frozen=True)
class SelectorConfig:
    """The knobs of the Selector; the defaults are the paper's throughput runs. SPEC section 5.

    Raises ValueError, naming the knob, for a value that is not a number or not in its range.
    """
    alpha: float = 0.5                      # power of the mean over rows: 0 geometric, 1 arithmetic
    gamma: float = 0.5                      # how strongly the prior leans away from large keys
    weight_norm: float = 1.0                # w_norm
    weight_position: float = 0.7            # w_pos
    position_power: float = 1.8             # power
    position_eta: float = 0.4               # eta
    theta: float = 0.6                      # theta and p make the slope beta of the position term
    p: float = 0.9
    lambda_cap_single: float = 0.35         # the largest share of the prior, with one evidence row
    lambda_cap_multi: float = 0.25          # and with several
    nms_window: int = 32                    # w
    nms_alpha: float = 1.0                  # a_nms
    exclusivity_alpha: float = 0.85         # a_ex
    exclusivity_temperature: float = 2.0
    eps: float = 1e-12
    spread: int = 0                         # ours, not the paper's; 0 is off

    def __post_init__(self):
        # The bounds are wide: inside them no stage overflows in fp32.
        check_knobs(self, dict(
            theta=(1e-30, 1), p=(1e-6, 1e6), lambda_cap_single=(0, 1), lambda_cap_multi=(0, 1), nms_window=(0, 2**31),
            exclusivity_temperature=(1e-6, 1e6), eps=(1e-30, 1), spread=(0, 2**31)))
        if 0 < self.alpha < 0.01:           # alpha log p would drown in fp32's rounding of the sum over rows
            raise ValueError(f"alpha must be 0 or at least 0.01, not {self.alpha!r}")


class Selection(NamedTuple):
    """Every stage of one selection, over the candidates [..., G, n], and what was selected. SPEC sections 5 and 8."""
    log_evidence: torch.Tensor              # log f
    log_prior: torch.Tensor                 # log r
    lam: torch.Tensor                       # [..., G]
    log_fused: torch.Tensor                 # log s
    log_nms: torch.Tensor
    log_exclusive: torch.Tensor
    log_spread: torch.Tensor                # float64 with spread, log_exclusive itself without
    positions: torch.Tensor                 # [..., G, min(count, n)] int64, absolute, ascending


def select(logits, key_norms, lo, hi, count, config):
    """The `count` best candidates in [lo, hi) of each KV head, with every stage that led to them.

    logits [..., G, R, N], raw scaled logits, -inf at the positions that a row's query cannot see; key_norms
    [..., G, N], L2 norms of the cached keys -> Selection. Nothing outside [lo, hi) is read. With n <= count all are
    selected. Raises ValueError if the candidates do not fit into N or count is negative. SPEC section 5.
    """
    if key_norms.shape[-1] != logits.shape[-1]:
        raise ValueError(f"key_norms has {key_norms.shape[-1]} positions, logits {logits.shape[-1]}")
    if not 0 <= lo <= hi <= logits.shape[-1] or count < 0:
        raise ValueError(f"cannot select {count} of the candidates [{lo}, {hi}) among {logits.shape[-1]} positions")
    log_f = evidence(logits, lo, hi, config.alpha)
    log_r = prior(key_norms, lo, hi, config)
    lam = mixing_weight(log_f, log_r, seeing(logits, lo, hi).sum(-1), config)
    log_s = fuse(log_f, log_r, lam)
    log_nms = soft_nms(log_s, config.nms_window, config.nms_alpha)
    log_exclusive = exclude(log_nms, config.exclusivity_alpha, config.exclusivity_temperature, config.eps)
    log_spread = spread(log_exclusive, config.spread)
    return Selection(log_f, log_r, lam, log_s, log_nms, log_exclusive, log_spread, top(log_spread, lo, count))


def at_least_fp32(x):
    """x in float32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def seeing(logits, lo, hi):
    """Which rows see a candidate at all; the others do not count in R. [..., G, R, N] -> bool [..., G, R]."""
    return (logits[..., lo:hi] > NEVER).any(-1)


def evidence(logits, lo, hi, alpha):
    """1. log f = (logsumexp_r(alpha log p_r) - log R) / alpha, normalised; p_r is row r's softmax over the candidates.

    At alpha = 0 the mean of log p_r, which is -inf where any row is. Flat if that leaves no candidate, or no row sees
    one. logits [..., G, R, N] -> [..., G, n].
    """
    blind = ~seeing(logits, lo, hi)[..., None]                              # [..., G, R, 1]
    log_p = at_least_fp32(logits[..., lo:hi]).log_softmax(-1)               # NaN in a blind row
    if alpha == 0:
        log_f = log_p.masked_fill(blind, 0).sum(-2) / (~blind).sum(-2).clamp(min=1)
    else:
        log_f = log_p.mul(alpha).masked_fill(blind, NEVER).logsumexp(-2) / alpha    # normalising takes - log R out
    return log_f.masked_fill((log_f == NEVER).all(-1, keepdim=True), 0).log_softmax(-1)


def prior(key_norms, lo, hi, config):
    """2. log r = w_norm (-gamma ln max(||key||, eps)) + w_pos (-beta x^power + eta ln max(1 - x, eps)), normalised.

    x runs from 0 at the first candidate to 1 at the last, beta = -ln(theta) / p. key_norms [..., G, N] -> [..., G, n].
    """
    norms = at_least_fp32(key_norms[..., lo:hi])
    n = hi - lo
    x = torch.arange(n, device=norms.device, dtype=torch.float64) / max(n - 1, 1)   # 1 - x is coarse in fp32
    beta = -math.log(config.theta) / config.p
    place = -beta * x**config.position_power + config.position_eta * (1 - x).clamp(min=config.eps).log()
    log_r = -config.weight_norm * config.gamma * norms.clamp(min=config.eps).log()
    return (log_r + (config.weight_position * place).to(norms.dtype)).log_softmax(-1)


def mixing_weight(log_f, log_r, rows, config):
    """3a. lambda = <f, f - r> / ||f - r||^2, the minimiser of ||(1 - lambda) f + lambda r||^2, clipped to [0, cap].

    0 where f = r. log_f, log_r [..., G, n]; rows [..., G], the R of the evidence: one row has a cap of its own
    -> [..., G].
    """
    f = log_f.exp()
    difference = f - log_r.exp()
    square = difference.square().sum(-1)
    lam = torch.where(square > 0, (f * difference).sum(-1) / square, 0)
    return torch.where(rows > 1, lam.clamp(0, config.lambda_cap_multi), lam.clamp(0, config.lambda_cap_single))


def fuse(log_f, log_r, lam):
    """3b. s = (1 - lambda) f + lambda r, the minimiser of (1 - lambda) KL(f || s) + lambda KL(r || s).

    log_f, log_r [..., G, n], lam [..., G] -> log s [..., G, n].
    """
    lam = lam[..., None]
    return torch.logaddexp((-lam).log1p() + log_f, lam.log() + log_r)


def window_max(scores, reach):
    """The maximum of the scores within +-reach of each position, inside the candidates. [..., n] -> [..., n]."""
    n = scores.shape[-1]
    reach = min(reach, n - 1)
    if reach <= 0 or not scores.numel():
        return scores
    return F.max_pool1d(scores.reshape(-1, n), 2 * reach + 1, stride=1, padding=reach).view_as(scores)


def soft_nms(scores, window, strength):
    """4. ln s_i <- ln s_i - a_nms (m_i - ln s_i), m_i the maximum over [i - w/2, i + w/2]: a peak keeps its score."""
    lowered = scores - strength * (window_max(scores, window // 2) - scores)
    return lowered.masked_fill(scores == NEVER, NEVER)


def exclude(scores, strength, temperature, eps):
    """5. score <- score + a_ex ln max(share, eps), share = softmax of score / temperature over the G heads, dim -2.

    The heads of a layer compete for a position. With one head its share is 1 and nothing changes.
    """
    log_share = (scores / temperature).log_softmax(-2).clamp(min=math.log(eps))
    return (scores + strength * log_share).masked_fill(scores == NEVER, NEVER)


def spread(scores, reach):
    """6. Ours: each score becomes the maximum within +-reach plus 1e-6 of its own; reach 0 is off.

    That sum is in float64: a millionth is below what fp32 resolves, and the ties it is there for would stay.
    """
    return window_max(scores, reach).double() + 1e-6 * scores.double() if reach else scores


def top(scores, lo, count):
    """7. The positions of the best scores, ascending; ties are free. [..., n] -> [..., min(count, n)] int64."""
    return scores.topk(min(count, scores.shape[-1]), sorted=False).indices.sort(-1).values + lo


def support(probabilities, count):
    """The `count` positions with most mass, ascending. [..., N] -> [..., min(count, N)] int64. SPEC section 7.

    Raises ValueError if count is negative.
    """
    if count < 0:
        raise ValueError(f"count must be at least 0, not {count}")
    return top(probabilities, 0, count)


def support_at_mass(probabilities, mass):
    """The fewest positions that hold `mass` of the total, a fraction in [0, 1]. SPEC section 7.

    [..., N] -> [..., m] int64, ascending, where m is the size of the largest set; smaller ones begin with -1s, which
    `overlap` and `kept_mass` ignore. Raises ValueError for a mass outside [0, 1].
    """
    if not 0 <= mass <= 1:
        raise ValueError(f"mass must be in [0, 1], not {mass!r}")
    ranked, positions = probabilities.double().sort(-1, descending=True)
    held = ranked.cumsum(-1)
    needed = held - ranked < mass * held[..., -1:]          # the better ones alone do not hold it
    return positions.masked_fill(~needed, -1).sort(-1).values[..., held.shape[-1] - needed.sum(-1).max():]


def overlap(a, b):
    """|A and B| / |A or B| of two sets of positions; both empty: 1. SPEC section 7.

    a [..., m] and b [..., m'], integers without repeats in any order; negative ones are padding -> [...] float32.
    """
    both = torch.cat([a, b], dim=-1).sort(-1).values
    shared = ((both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)).sum(-1)
    union = (both >= 0).sum(-1) - shared
    return torch.where(union > 0, shared / union, 1.0)


def kept_mass(probabilities, positions):
    """The mass that a memory of these positions holds. [..., N], [..., m] int64 (negative: padding)
    -> [...] in at least fp32.
    """
    mass = at_least_fp32(probabilities).gather(-1, positions.clamp(min=0))
    return mass.masked_fill(positions < 0, 0).sum(-1)
