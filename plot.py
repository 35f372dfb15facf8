"""Figures: one text's steps (`python sfi.py --prompt F --plot F.png`), stability of support, quality by budget, place.

Numbers come first and pictures after: `trace` and `stability` measure by watching the attention of a decoding run, the
rest only draws. Needs matplotlib, which nothing else in the project does.
Paper: within-sentence support stability, the observation that the method stands on. SPEC section 7.

    python plot.py                      stability on held-out documents of the shipped checkpoint -> bench/results/

Symbols: N cached tokens, L layers, G KV heads, m the size of a support. Overlap at step t compares the supports of
steps t - 1 and t.
"""
import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fidelity import Probe
from selector import kept_mass, overlap, support
from sfi import SFIConfig, SlowFastMemory, Stepper, Trigger, decode, read_prompts, sentence_tokens
from trace import whole_file

SUPPORT = 64                            # m
ROWS = 256                              # of the map of positions
SLOW, STARTS, OVERLAP, KEPT = "#d55e00", "#999999", "#0072b2", "#009e73"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")


def pyplot():
    """matplotlib's pyplot, drawing to files. ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "axes.titlesize": 10, "legend.frameon": False, "figure.dpi": 130})
    return pyplot


def check_ending(flag, name):
    """Raise ValueError if matplotlib is missing or writes no file with this ending."""
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(name).suffix[1:].lower() not in kinds:
        raise ValueError(f"{flag} must end in one of {', '.join(kinds)}, which matplotlib writes, not {name!r}")


def save(figure, path):
    with whole_file(path) as unfinished:
        figure.savefig(unfinished)
    pyplot().close(figure)


class Dense(SlowFastMemory):
    """Selects in slow steps as ever, but reads everything: selections judged in full KV's own states."""

    def plan(self, slow):
        return [(0, 0, n, int(s)) for n, s in zip(self.lengths, slow)]


def sentence_starts(ids, sentences):
    """For each step of a run over `ids`, whether the token it takes as input starts a sentence. Step 0 is prefill."""
    trigger = Trigger(SFIConfig(min_gap=0, refresh_interval=len(ids) + 1), *sentences)
    return [False] + [trigger(step + 1, token) == "sentence" for step, token in enumerate(ids[:-1])]


@dataclass(frozen=True)
class Trace:
    """What `trace` saw in n steps after prefill.

    overlap [n, L, G]: of supports with the step before (NaN in the first). kept, held [n, L, G]: the mass on sink,
    selected and recent tokens; the selected ones' part of the mass on all candidates (both NaN in slow steps). reads
    [n, ROWS]: which share of (layer, KV head, position) was read, by position (NaN where no token is yet). starts,
    reasons, since [n]: does it take a sentence's first token, why was it slow (None: fast), steps since the last slow
    one. total: tokens at the end.
    """
    overlap: torch.Tensor
    kept: torch.Tensor
    held: torch.Tensor
    reads: torch.Tensor
    starts: list
    reasons: list
    since: list
    total: int


@torch.inference_mode()
def trace(model, full, logits, config, ids, memory=SlowFastMemory):
    """Feed `ids` to a memory on `full`, which holds one prompt, and watch its attention -> Trace.

    logits [1, V] are prefill's. Raises ValueError for a batch.
    """
    if full.batch != 1:
        raise ValueError(f"a figure shows one prompt, not {full.batch}")
    prompt, total = full.lengths[0], full.lengths[0] + len(ids)
    memory = memory(model, full, config, group=1)
    place = torch.arange(total) * ROWS // total                             # position -> row of the map
    supports, seen = {}, {}                                                 # by (N, layer): a step's last pass counts

    def see(layer, b, p, row):
        _, start, n, slow = row
        mine = supports[n, layer] = support(p, SUPPORT)
        supports.pop((n - 2, layer), None)
        before = supports.get((n - 1, layer))                               # a step done again asks for it twice
        unknown = torch.full(p.shape[:1], float("nan"))
        same = unknown if before is None else overlap(mine, before)
        read = torch.arange(n).expand(len(p), n) if start == 0 else memory.reads(layer, b, n)
        kept = held = unknown
        if not slow:
            first, edge = memory.firsts[b], memory.edges[b]
            kept = kept_mass(p, memory.reads(layer, b, n))
            held = kept_mass(p, memory.positions[layer, b, :, : memory.counts[b]]) / p[:, first:edge].sum(-1)
        seen[n, layer] = (same.cpu(), kept.cpu(), held.cpu(), place[read.cpu()].flatten().bincount(minlength=ROWS))

    reasons = []
    for token in decode(model, memory, logits, config, len(ids), sentence_tokens(model), (), forced=[ids],
                        stepper=Stepper(model, Probe(memory, see), capture=False)):
        reasons.append(token.records[0].reason)
    steps, layers = range(prompt + 1, total), range(model.config.num_hidden_layers)
    same, kept, held, read = (torch.stack([torch.stack([seen[n, layer][i] for layer in layers]) for n in steps])
                              for i in range(4))
    there = torch.stack([place[:n].bincount(minlength=ROWS) for n in steps]) * read.shape[1] * same.shape[2]
    last_slow, since = 0, []
    for step, reason in enumerate(reasons):
        last_slow = step if reason else last_slow
        since.append(step - last_slow)
    return Trace(same, kept, held, read.sum(1) / there, sentence_starts(ids, sentence_tokens(model))[1:],
                 reasons[1:], since[1:], total)


def draw(model, full, logits, config, ids, path, title="Slow-Fast Inference, step by step"):
    """The figure of one text's steps, written to `path`.

    full: a FullMemory of one prompt, rewound to its end; logits [1, V] its prefill's; ids: the tokens written,
    which are fed again and watched. Raises ValueError for a batch, for fewer than 3 tokens, or without matplotlib.
    """
    plt = pyplot()
    if len(ids) < 3:
        raise ValueError(f"a figure needs at least 3 tokens, not {len(ids)}")
    seen = trace(model, full, logits, config, ids)
    x = list(range(1, len(ids)))
    figure, (top, below) = plt.subplots(2, sharex=True, figsize=(10, 6.4), height_ratios=(1, 1.6), layout="constrained")
    dashes = (0, (2, 2))
    for step in (step for step, start in zip(x, seen.starts) if start):
        top.axvline(step, color=STARTS, linewidth=0.9, linestyle=dashes)
        if model.tokenizer:
            words = model.tokenizer.decode(ids[step - 1 : step + 5]).strip().split("\n")[0]
            top.text(step, 1.03, f"{words} ...", rotation=20, fontsize=7, color="#555555")
    for step in (step for step, reason in zip(x, seen.reasons) if reason):
        for axes in (top, below):
            axes.axvspan(step - 0.5, step + 0.5, color=SLOW, alpha=0.35 if axes is top else 1, linewidth=0)
    top.plot(x, seen.kept.mean((1, 2)), color=KEPT, label="kept mass: attention on what the fast step reads")
    top.plot(x, seen.overlap.mean((1, 2)), color=OVERLAP,
             label=f"overlap of the {SUPPORT} most attended tokens with the "
             "step before")
    top.fill_between([], [], color=SLOW, alpha=0.6, label="slow step: reads everything, selects anew")
    top.plot([], [], color=STARTS, linewidth=0.9, linestyle=dashes, label="a sentence starts")
    top.set(ylim=(0, 1), ylabel="mean of all heads")
    figure.suptitle(title, fontsize=11)
    top.legend(loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=2)
    image = below.imshow(seen.reads.T.numpy(), aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1,
                         extent=(0.5, len(ids) - 0.5, 0, seen.total), interpolation="nearest")
    below.text(2, full.lengths[0] - len(ids) - config.recent / 2, "recent", va="center", color="white")
    below.set(xlabel="step (generated token)", ylabel="position in the context: selected in blue")
    figure.colorbar(image, ax=below, label="KV heads that read there", pad=0.01,
                    fraction=0.04).ax.yaxis.set_major_formatter(
        lambda share, _: f"{100 * share:.0f} %")
    save(figure, path)


# Stability over documents

def stability(model, cases, config):
    """Overlap of supports inside and across sentences and the decay of kept mass, under full KV.

    cases: (prompt ids, forced ids) pairs. config: a function from prompt tokens to {name: SFIConfig} of the selections
    that are followed -> {"within", "across" [L][G]: mean overlap; "around" {steps from a sentence start: overlap};
    "held" {name: {steps since the slow step: its part of the mass on the candidates}}}.
    """
    within, across, around, held = [], [], {}, {}
    for prompt, ids in cases:
        full, logits, _ = read_prompts(model, [prompt], SFIConfig(), len(ids))
        for number, (name, knobs) in enumerate(config(len(prompt)).items()):
            full.rewind([len(prompt)])
            seen = trace(model, full, logits, knobs, ids, Dense)
            for since, mass in zip(seen.since, seen.held.mean((1, 2)).tolist()):
                held.setdefault(name, {}).setdefault(since, []).append(mass)
            if number:                                                      # supports are the same: full KV's
                continue
            starts = torch.tensor(seen.starts[1:])
            across.append(seen.overlap[1:][starts])
            within.append(seen.overlap[1:][~starts])
            mean = seen.overlap.mean((1, 2)).tolist()
            for at in (i for i, start in enumerate(seen.starts) if start):
                for step in range(max(1, at - 12), min(len(mean), at + 13)):
                    around.setdefault(step - at, []).append(mean[step])

    def means(lists):
        return {key: sum(values) / len(values) for key, values in sorted(lists.items()) if values[0] == values[0]}

    return {"within": torch.cat(within).mean(0).tolist(), "across": torch.cat(across).mean(0).tolist(),
            "around": means(around), "held": {name: means(by_age) for name, by_age in held.items()}}


def draw_stability(found, path):
    """The figure of what `stability` found."""
    plt = pyplot()
    within, across = torch.tensor(found["within"]), torch.tensor(found["across"])
    figure, (heads, start, age) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    layers = len(within)
    colours = plt.get_cmap("viridis")
    for layer in range(layers):
        heads.scatter(across[layer], within[layer], color=colours(layer / max(1, layers - 1)), s=22,
                      label=f"layer {layer}")
    heads.plot([0, 1], [0, 1], color=STARTS, linewidth=0.8, zorder=0)
    heads.set(xlim=(0, 1), ylim=(0, 1), xlabel="across a sentence start", ylabel="inside a sentence",
              title="Overlap of consecutive supports, each KV head", aspect="equal")
    heads.legend(fontsize=7, loc="lower right", handletextpad=0, borderpad=0)
    steps = sorted(found["around"], key=int)
    start.plot([int(s) for s in steps], [found["around"][s] for s in steps], color=OVERLAP, marker="o", markersize=3)
    start.axvline(0, color=STARTS, linewidth=0.8, linestyle=(0, (2, 2)))
    start.set(xlabel="steps from a sentence's first token", ylabel="overlap, mean of all heads",
              title="Overlap around a sentence start")
    for (name, by_age), colour in zip(found["held"].items(), COLOURS):
        ages = sorted(by_age, key=int)
        age.plot([int(a) for a in ages], [by_age[a] for a in ages], color=colour, label=name)
    age.set(xlabel="steps since the slow step that selected", ylabel="its part of the mass on candidates",
            title="A selection ages")
    age.legend()
    save(figure, path)


# Pictures of bench/quality.py's numbers

def curve(points, path):
    """Quality by budget. points: {method: [(budget, attended, read, values right, KL)]}, fractions and nats."""
    plt = pyplot()
    figure, (right, distance) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for (name, rows), colour in zip(points.items(), COLOURS):
        budgets, _, _, values, kl = zip(*rows)
        style = dict(color=colour, marker="o", markersize=3.5, label=name)
        right.plot([100 * b for b in budgets], [100 * v for v in values], **style)
        distance.plot([100 * b for b in budgets], kl, **style)
    for axes in (right, distance):
        axes.set(xscale="log", xlabel="read by a fast step, % of the prompt")
        axes.set_xticks([100 * row[0] for row in next(iter(points.values()))])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    right.set(ylabel="values right, %", ylim=(0, 102), title="Lookups")
    distance.set(yscale="log", ylabel="KL to full KV, nats", title="Distance to full KV, all answer tokens")
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    save(figure, path)


def needle(grids, depths, lengths, path):
    """Depth by length, a grid per method. grids: {method: [depth][length] fraction right}."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(grids), figsize=(2.3 * len(grids) + 0.8, 3), sharey=True, squeeze=False,
                                layout="constrained")
    for ax, (name, grid) in zip(axes[0], grids.items()):
        image = ax.imshow([[100 * value for value in row] for row in grid], vmin=0, vmax=100, cmap="RdYlGn",
                          aspect="auto")
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center")
        ax.set(title=name, xlabel="tokens")
        ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        ax.set_yticks(range(len(depths)), [f"{100 * d:g} %" for d in depths])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    axes[0][0].set_ylabel("depth of the facts")
    figure.colorbar(image, ax=axes, label="values right, %", pad=0.02)
    save(figure, path)


def main(argv=None):
    root = Path(__file__).resolve().parent
    sys.path.insert(0, str(root / "tiny"))
    import model as qwen3
    import text
    p = argparse.ArgumentParser(description="Stability of support on held-out documents, measured under full KV and "
                                            "drawn.")
    p.add_argument("--model", default=str(root / "tiny"), help="folder or hub id (default: the shipped checkpoint)")
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--documents", type=int, default=6)
    p.add_argument("--seed", type=int, default=500_000)
    p.add_argument("--retain", type=float, default=0.12, help="K as a fraction of the prompt (default: %(default)s)")
    p.add_argument("--output", default=str(root / "bench" / "results" / "stability.png"),
                   help="numbers go beside it, as JSON")
    arguments = p.parse_args(argv)
    check_ending("--output", arguments.output)
    if min(arguments.length, arguments.documents) < 1 or not 0 <= arguments.retain <= 1:
        raise ValueError("--length and --documents must be at least 1, --retain from 0 to 1")
    model = qwen3.load(arguments.model, dtype=torch.float32)
    cases = []
    for i in range(arguments.documents):
        document = text.make_document(arguments.seed + i, arguments.length, text.LAYOUTS[i % 2])
        cases.append([model.tokenizer.encode(part) for part in (document.prompt, document.answer + text.END)])

    def config(tokens):
        return {name: SFIConfig.preset(name, selected=round(arguments.retain * tokens), policy="interval",
                                       refresh_interval=64)
                for name in ("paper", "robust")}

    found = stability(model, cases, config)
    Path(arguments.output).with_suffix(".json").write_text(json.dumps(found))
    draw_stability(found, arguments.output)
    within, across = (torch.tensor(found[name]) for name in ("within", "across"))
    print(f"overlap of consecutive supports of {SUPPORT} tokens: {within.mean():.3f} inside sentences, "
          f"{across.mean():.3f} across a sentence start; higher inside in "
          f"{(within > across).float().mean():.0%} of KV heads")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"plot: {error}")
