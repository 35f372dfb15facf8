"""How faithful SFI is to full KV on the same tokens, as numbers. SPEC section 7.

`Probe` watches a memory without changing it; `compare` feeds one memory the tokens that full KV wrote and measures
the distance of what it would have said. This file knows nothing of how tokens are selected or shown.
Paper: its quality section, and the kept mass and support stability behind it.
"""
from dataclasses import dataclass, field

import torch

from selector import kept_mass
from sfi import Stepper, decode


class Probe:
    """A memory that shows each decode step's true attention to `see(layer, b, p, row)` and else is the one it wraps.

    p [G, N] is the attention over all N tokens of this step's own queries, mean over the query heads of a KV head;
    row the sequence's plan. Attention is computed a second time, in full: for measuring, never for timing.
    """

    def __init__(self, memory, see):
        self.memory, self.see = memory, see

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def attend(self, layer, q, k, v, step):
        out = self.memory.attend(layer, q, k, v, step)
        full = getattr(self.memory, "full", self.memory)
        for b, row in enumerate(step.plan.tolist()):
            keys = full.keys[layer, b, :, : row[2]].to(full.key_norms.dtype)                # [G, N, D]
            heads = q[b, 0].unflatten(0, (keys.shape[0], -1)).to(keys.dtype)                # [G, H/G, D]
            p = (heads @ keys.mT * full.scale).softmax(-1).mean(1)                          # [G, N]
            self.see(layer, b, p, row)
        return out


@dataclass
class Fidelity:
    """Per compared token of one sequence, lists of floats: KL from full KV's next-token distribution (nats), top-1
    agreement (0 or 1), difference of negative log-likelihood; and kept mass, one number per fast step (mean over layers
    and KV heads)."""
    kl: list = field(default_factory=list)
    agreement: list = field(default_factory=list)
    nll_difference: list = field(default_factory=list)
    kept: list = field(default_factory=list)

    def means(self):
        """The mean of each list, None for one that is empty."""
        return {name: sum(v) / len(v) if v else None for name, v in vars(self).items()}


def compare(model, memory, logits, config, forced, reference, sentences):
    """Feed `memory`, prefilled, the tokens of full KV and compare with its logits -> a Fidelity per sequence.

    logits [B, V] prefill's; forced: a list of ids per sequence; reference: per step, full KV's logits [B, V].
    """
    results = [Fidelity() for _ in forced]
    mass = {}                                   # (sequence) -> kept mass of this step, per layer

    def see(layer, b, p, row):
        if not row[3]:
            mass.setdefault(b, []).append(kept_mass(p, memory.reads(layer, b, row[2])).mean().item())

    longest = max(map(len, forced))
    padded = [row + row[-1:] * (longest - len(row)) for row in forced]
    stepper = Stepper(model, Probe(memory, see), capture=False)
    for token in decode(model, memory, logits, config, longest, sentences, (), forced=padded, stepper=stepper):
        for b, (result, ids, record) in enumerate(zip(results, forced, token.records)):
            if token.step == 0 or token.step >= len(ids):                   # step 0 is prefill, the same for both
                continue
            full, ours = (x[b].to(torch.float64).log_softmax(-1) for x in (reference[token.step], token.logits))
            result.kl.append((full.exp() * (full - ours)).sum().item())
            result.agreement.append(float(full.argmax() == ours.argmax()))
            result.nll_difference.append((full - ours)[ids[token.step]].item())
            if record.kind == "fast":
                result.kept.append(sum(mass[b]) / len(mass[b]))
        mass.clear()
    return results
