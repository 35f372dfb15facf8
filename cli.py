"""The command line of sfi.py: read prompts, run full KV and SFI, print what each writes and a table of the differences.

Text goes to stdout, all else to stderr. Bad input is one line there and exit 2. Defaults come from the configuration
classes and the two constants below; a knob's flag is made from its field: a new knob needs only its line in HELP.
"""
import argparse
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

import fidelity
import model as qwen3
import plot
import trace as traces
import verify
from selector import SelectorConfig
from sfi import (PRESETS, RETAINS, Generation, Sampling, SFIConfig, SlowFastMemory, decode, read_prompts,
                 sentence_tokens)

PRESET, RETAIN = "robust", 0.15         # the command line's own; the configuration classes default to the paper's
COMPARED = 1024                         # tokens on which SFI is compared with full KV: their logits are kept
SHIPPED = Path(__file__).parent / "tiny"
HELP = dict(
    sink="first tokens that are always read", recent="last tokens before a slow step that are always read",
    selected="K, tokens selected per KV head", refresh_interval="steps after which a step is slow in any case",
    min_gap="a sentence that starts fewer steps than this after a slow step makes no step slow",
    policy="sentence, interval, never or always", evidence_queries="queries whose logits are a slow step's evidence",
    bootstrap_queries="last prompt queries that give the first evidence",
    doubt="redo a fast step slowly if its likeliest token is less likely than this; 0 is off",
    doubt_gap="least steps from one redone step to the next", alpha="power of the mean over evidence rows",
    gamma="how strongly the prior leans away from large keys", weight_norm="weight of the prior's key norm term",
    weight_position="weight of the prior's position term", position_power="its power of the position",
    position_eta="its logarithmic fall towards the end", theta="with p: its slope, -ln(theta) / p", p="see theta",
    lambda_cap_single="largest share of the prior, one evidence row", lambda_cap_multi="the same, several rows",
    nms_window="window of the soft-NMS, positions", nms_alpha="its strength",
    exclusivity_alpha="strength of the cross-head exclusivity", exclusivity_temperature="its temperature",
    eps="floor of norms and shares", spread="a peak brings the positions within +-spread; 0 is off",
    temperature="0 takes the likeliest token", top_k="0 keeps all", top_p="1 keeps all", min_p="0 keeps all",
    seed="the same seed writes the same text")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error instead of the whole usage."""

    def error(self, message):
        raise ValueError(message)


def parser():
    p = Parser(prog="sfi.py", description="Decode a prompt with full KV and with Slow-Fast Inference, side by side.",
               allow_abbrev=False)
    p.add_argument("--prompt", nargs="+", action="extend", metavar="FILE",
                   help="text file, or - for standard input; several files are one batch")
    run = p.add_argument_group("run")
    run.add_argument("--mode", choices=("full", "sfi", "both"), default="both", help="(default: %(default)s)")
    run.add_argument("--model", default=str(SHIPPED), help="folder or hub id (default: the shipped checkpoint)")
    run.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda where there is one)")
    run.add_argument("--dtype", choices=tuple(DTYPES), help="(default: float32 on a CPU, the checkpoint's on CUDA)")
    run.add_argument("--max-new-tokens", type=int, default=512, help="(default: %(default)s)")
    run.add_argument("--json", action="store_true", help="print one line of JSON last on stderr")
    shown = p.add_argument_group("what happened, in files")
    shown.add_argument("--plot", metavar="FILE.png", help="draw the steps of SFI's text (needs matplotlib)")
    shown.add_argument("--trace", metavar="FILE", help="run SFI once more and write every intermediate (safetensors)")
    shown.add_argument("--trace-depth", choices=tuple(traces.DEPTHS), default="selection",
                       help="(default: %(default)s)")
    shown.add_argument("--trace-layers", type=span, metavar="A:B", help="layers A to B - 1 (default: all)")
    shown.add_argument("--trace-steps", type=span, metavar="A:B", help="steps A to B - 1 (default: all)")
    shown.add_argument("--verify", metavar="FILE", help="compare a trace, ours or a port's, with what --model computes "
                       "(on a CPU by default); exit 0: equal, 1: differs, and says where first")
    text = p.add_argument_group("prompt format")
    kind = text.add_mutually_exclusive_group()
    kind.add_argument("--raw", dest="chat", action="store_false", default=False,
                      help="continue the text as it is (default)")
    kind.add_argument("--chat", action="store_true", help="the file is a user's message in the model's chat template")
    text.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True,
                      help="with --chat: whether the model may think first (default: it may)")
    knobs = p.add_argument_group("Slow-Fast Inference", "a knob that is not given has the preset's value")
    knobs.add_argument("--preset", choices=tuple(PRESETS), default=PRESET, help="(default: %(default)s)")
    knobs.add_argument("--retain", type=float, metavar="FRACTION",
                       help=f"K as a fraction of the longest prompt, instead of --selected (default: {RETAIN}); "
                       + ", ".join(f"{name} has {share} of its own" for name, share in RETAINS.items()))
    add_fields(knobs, SFIConfig)
    add_fields(p.add_argument_group("Selector", "knobs of the scores; not given: the preset's"), SelectorConfig)
    add_fields(p.add_argument_group("sampling"), Sampling)
    return p


def span(text):
    """The range written as A:B."""
    start, _, stop = text.partition(":")
    try:
        return range(int(start), int(stop))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a range is written A:B, not {text!r}") from None


def add_fields(group, cls):
    """One flag per field of a configuration class, typed as its default is, None where it is not given."""
    owner = "default" if cls is Sampling else "paper"
    for f in fields(cls):
        if f.name != "selector":
            kind = type(f.default)
            group.add_argument("--" + f.name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(),
                               help=f"{HELP[f.name]} ({owner}: {f.default})")


def given(arguments, cls):
    """The fields of `cls` that the command line sets."""
    return {f.name: value for f in fields(cls) if (value := getattr(arguments, f.name, None)) is not None}


def read_text(name):
    """The prompt in file `name`, or of standard input for "-", less the newline that ends a text file."""
    if name == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    try:
        text = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.translate({0xFEFF: None, 0x200B: None}).strip():            # marks that show nothing
        raise ValueError(f"{name} is {'blank' if text else 'empty'}")
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def one_line_errors():
    """Bad input, from wherever it is noticed: one line on stderr, exit 2."""
    try:
        yield
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print("sfi: " + " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


@contextmanager
def one_output(codes):
    """Writing one file: if it fails, in one line, the others still come out; the exit code joins `codes`."""
    try:
        with one_line_errors():
            yield
    except SystemExit as failed:
        codes.append(failed.code)


@dataclass
class Run:
    """One memory's pass over a batch: a Generation per prompt and the first logits kept for comparison."""
    generations: list
    reference: list
    interrupted: bool = False


def run(model, memory, logits, config, arguments, sampling, seconds, keep=0):
    """Decode, stream the text of a single prompt to stdout as it comes and print a batch's texts at the end -> Run."""
    batch = memory.batch
    result = Run([Generation([], [], seconds) for _ in range(batch)], [])
    streams = [model.tokenizer.stream() for _ in range(batch)]
    texts = [""] * batch

    def show(b, piece):
        texts[b] += piece
        if batch == 1:
            print(piece, end="", flush=True)

    try:
        for token in decode(model, memory, logits, config, arguments.max_new_tokens, sentence_tokens(model),
                            model.stop_ids, sampling):
            if token.step < keep:
                result.reference.append(token.logits.clone())
            for b, (id, record) in enumerate(zip(token.ids, token.records)):
                if id is not None:
                    result.generations[b].ids.append(id)
                    result.generations[b].steps.append(record)
                    show(b, streams[b].push(id))
    except KeyboardInterrupt:
        result.interrupted = True
    for b in range(batch):
        show(b, streams[b].finish())
    if batch == 1:
        print(flush=True)
    else:
        for name, text in zip(arguments.prompt, texts):
            print(f"[{name}]\n{text}" if arguments.mode == "both" else text, flush=True)
    return result


def speed(steps):
    """Milliseconds per slow and fast step and tokens per second over all steps after prefill."""
    timed = steps[1:]
    by_kind = {kind: [s.seconds for s in timed if s.kind == kind] for kind in ("slow", "fast")}
    total = sum(s.seconds for s in timed)
    return {"tokens_per_second": len(timed) / total if total else None,
            **{f"{kind}_step_ms": 1000 * sum(v) / len(v) if v else None for kind, v in by_kind.items()}}


def reasons(steps):
    """How often each reason made a step slow, prefill's step 0 left out."""
    counts = {}
    for s in steps[1:]:
        if s.reason:
            counts[s.reason] = counts.get(s.reason, 0) + 1
    return counts


def summary(name, prompt_tokens, full, sfi, faithful):
    """What the table and --json say of one prompt, as a flat dict; a run or comparison that is None adds nothing."""
    rows = {"prompt": name, "prompt_tokens": prompt_tokens}
    for label, generation in (("full", full), ("sfi", sfi)):
        if generation:
            rows |= {f"{label}_new_tokens": len(generation.ids), "prefill_seconds": generation.prefill_seconds}
            rows |= {f"{label}_{key}": value for key, value in speed(generation.steps).items()}
    if sfi:
        timed = sfi.steps[1:]
        rows |= {"slow_steps": sum(s.kind == "slow" for s in timed), "fast_steps": sum(s.kind == "fast" for s in timed),
                 "slow_reasons": reasons(sfi.steps),
                 "kv_read": sum(s.read for s in timed) / sum(s.length for s in timed) if timed else None}
    if full and sfi:
        pairs = zip(full.ids, sfi.ids)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differs is None and len(full.ids) != len(sfi.ids):
            differs = min(len(full.ids), len(sfi.ids))
        rows["first_differing_token"] = differs
    if faithful:
        rows |= faithful.means()
    return rows


def described(preset, config, retain):
    """The preset, what it and the flags add to the paper's knobs, and K."""
    paper = SFIConfig()
    changed = {f.name: getattr(part, f.name) for part, base in ((config, paper), (config.selector, paper.selector))
               for f in fields(part) if f.name not in ("selector", "selected")
               and getattr(part, f.name) != getattr(base, f.name)}
    added = ", ".join(f"{name} {value}" for name, value in changed.items()) or "nothing"
    share = f" ({100 * retain:g} % of the longest prompt)" if retain is not None else ""
    return f"preset {preset}: the paper's knobs with {added}; K = {config.selected}{share}"


def table(rows):
    """The summary of one prompt as lines of text."""
    def number(key, scale=1.0, digits=1):
        return "-" if rows.get(key) is None else f"{scale * rows[key]:,.{digits}f}"

    def count(key):
        return "-" if rows.get(key) is None else f"{rows[key]:,}"

    lines = [f"{rows['prompt']}: {rows['prompt_tokens']:,} prompt tokens, prefill {rows['prefill_seconds']:.2f} s",
             f"  {'':24}{'full KV':>12}{'SFI':>12}",
             f"  {'new tokens':24}{count('full_new_tokens'):>12}{count('sfi_new_tokens'):>12}",
             f"  {'tokens/s':24}{number('full_tokens_per_second'):>12}{number('sfi_tokens_per_second'):>12}",
             f"  {'ms per slow step':24}{number('full_slow_step_ms', digits=2):>12}"
             f"{number('sfi_slow_step_ms', digits=2):>12}",
             f"  {'ms per fast step':24}{'-':>12}{number('sfi_fast_step_ms', digits=2):>12}"]
    if "slow_steps" in rows:
        why = ", ".join(f"{reason} {n}" for reason, n in rows["slow_reasons"].items()) or "none"
        lines += [f"  slow steps {rows['slow_steps']} ({why}), fast steps {rows['fast_steps']}, "
                  f"KV read {number('kv_read', 100)} % of full"]
    if "first_differing_token" in rows:
        where = rows["first_differing_token"]
        lines += ["  the two texts are the same" if where is None else f"  first differing token: {where}"]
    if "kl" in rows:
        lines += [f"  on full KV's tokens: top-1 agreement {number('agreement', 100)} %, "
                  f"KL {number('kl', digits=4)} nats, kept mass {number('kept', 100)} %"]
    return "\n".join(lines)


def encode(model, arguments, text):
    if arguments.chat:
        text = model.tokenizer.chat([{"role": "user", "content": text}], arguments.thinking)
    return model.tokenizer.encode(text)


def configure(arguments, longest):
    """The SFIConfig of preset and flags, and the fraction retained or None; longest: tokens of the longest prompt."""
    if arguments.retain is not None and arguments.selected is not None:
        raise ValueError("--retain and --selected both say how many tokens are selected: give one")
    default = RETAINS.get(arguments.preset, RETAIN)
    retain = None if arguments.selected is not None else default if arguments.retain is None else arguments.retain
    knobs = given(arguments, SFIConfig) | given(arguments, SelectorConfig)
    if retain is not None:
        if not 0 <= retain <= 1:
            raise ValueError(f"--retain must be a fraction from 0 to 1, not {retain}")
        knobs["selected"] = round(retain * longest)
    return SFIConfig.preset(arguments.preset, **knobs), retain


def check(arguments, device, dtype):
    """--verify: compare a trace; returns the exit code."""
    if arguments.prompt:
        raise ValueError("--verify takes its prompt from the trace: leave --prompt out")
    model = qwen3.load(arguments.model, device, dtype)
    report = verify.verify(arguments.verify, model, arguments.model)
    print(report)
    return report.code


def check_outputs(arguments):
    """Refuse a name that --plot or --trace could not write, or that would cost a prompt or the other output."""
    taken = {os.path.realpath(name): f"the prompt {name}" for name in arguments.prompt if name != "-"}
    for flag, name in (("--plot", arguments.plot), ("--trace", arguments.trace)):
        if name is None:
            continue
        path = Path(os.path.realpath(name))
        if not name or path.is_dir() or (path.exists() and not path.is_file()):
            raise ValueError(f"{flag} {name!r} is not a file's name")
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a folder")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ValueError(f"{flag} {name} cannot be written: {error.strerror}") from None
        if str(path) in taken:
            raise ValueError(f"{flag} {name} is {taken[str(path)]} too")
        taken[str(path)] = "the file of --plot"
    if arguments.plot:
        plot.check_ending("--plot", arguments.plot)


def work(arguments):
    """All that the command does; returns the exit code."""
    sampling = Sampling(**given(arguments, Sampling))
    configure(arguments, 0)                                                 # refuses bad knobs before anything is read
    if not arguments.thinking and not arguments.chat:
        raise ValueError("--no-thinking needs --chat")
    # A trace is judged by torch, the truth, and a half-precision one too in fp32.
    device = qwen3.usable(arguments.device or (
        "cuda" if torch.cuda.is_available() and not arguments.verify else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = DTYPES.get(arguments.dtype)
    if arguments.verify:
        return check(arguments, device, dtype or torch.float32)
    if not arguments.prompt:
        raise ValueError("--prompt FILE is needed")
    if arguments.mode == "full" and (arguments.plot or arguments.trace):
        raise ValueError("--plot and --trace show SFI: they need --mode sfi or both")
    if arguments.plot is not None:
        if len(arguments.prompt) > 1:
            raise ValueError("--plot draws one prompt, not a batch")
        if arguments.max_new_tokens < 3:
            raise ValueError("--plot needs --max-new-tokens of at least 3")
    elif arguments.trace is None and (arguments.trace_layers or arguments.trace_steps):
        raise ValueError("--trace-layers and --trace-steps need --trace FILE")
    check_outputs(arguments)
    texts = [read_text(name) for name in arguments.prompt]
    model = qwen3.load(arguments.model, device, dtype or (torch.float32 if device.type == "cpu" else None))
    traces.within("layers", arguments.trace_layers, model.config.num_hidden_layers)
    traces.within("steps", arguments.trace_steps, arguments.max_new_tokens)
    if model.tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer.json")
    prompts = [encode(model, arguments, text) for text in texts]
    config, retain = configure(arguments, max(map(len, prompts)))
    with tqdm(total=sum(map(len, prompts)), desc="prefill", unit="token", delay=2, leave=False, file=sys.stderr) as bar:
        full, logits, seconds = read_prompts(model, prompts, config, arguments.max_new_tokens, progress=bar.update)
    with torch.inference_mode():
        return decode_and_report(model, full, logits, seconds, prompts, config, retain, arguments, sampling)


def decode_and_report(model, full, logits, seconds, prompts, config, retain, arguments, sampling):
    lengths = list(full.lengths)
    runs = {}
    for mode, title in (("full", "Full KV"), ("sfi", "SFI")):
        if arguments.mode not in (mode, "both"):
            continue
        if arguments.mode == "both":
            print(f"{title}\n{'-' * len(title)}", flush=True)
        full.rewind(lengths)
        memory = full if mode == "full" else SlowFastMemory(model, full, config)
        runs[mode] = run(model, memory, logits, replace(config, policy="always") if mode == "full" else config,
                         arguments, sampling, seconds, COMPARED if (arguments.mode, mode) == ("both", "full") else 0)
        if arguments.mode == "both" and mode == "full":
            print(flush=True)
        if runs[mode].interrupted:
            break
    interrupted = any(r.interrupted for r in runs.values())
    faithful = [None] * len(prompts)
    if len(runs) == 2 and not interrupted:
        full.rewind(lengths)
        forced = [g.ids[:COMPARED] for g in runs["full"].generations]
        try:
            faithful = fidelity.compare(model, SlowFastMemory(model, full, config), logits, config, forced,
                                        runs["full"].reference, sentence_tokens(model))
        except KeyboardInterrupt:                                           # the texts' own numbers are still shown
            interrupted = True
    if "sfi" in runs:
        print(described(arguments.preset, config, retain), file=sys.stderr)
    generations = {mode: r.generations for mode, r in runs.items()}
    summaries = [summary(name, len(ids), *(generations[mode][b] if mode in generations else None
                                           for mode in ("full", "sfi")), faithful[b])
                 for b, (name, ids) in enumerate(zip(arguments.prompt, prompts))]
    for rows in summaries:
        print(table(rows), file=sys.stderr)
    if interrupted:
        print("interrupted", file=sys.stderr)
    codes = [130 if interrupted else 0]
    if arguments.trace and not interrupted:
        with one_output(codes):
            traces.record(arguments.trace, model, arguments.model, prompts, config, arguments.max_new_tokens,
                          arguments.trace_depth, arguments.trace_layers, arguments.trace_steps, sampling,
                          preset=arguments.preset)
            print(f"trace: {arguments.trace}", file=sys.stderr)
    if arguments.plot and not interrupted:
        full.rewind(lengths)
        ids = runs["sfi"].generations[0].ids
        if len(ids) < 3:
            print("no figure: fewer than 3 tokens were written", file=sys.stderr)
        else:
            with one_output(codes):
                plot.draw(model, full, logits, config, ids, arguments.plot)
                print(f"figure: {arguments.plot}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"model": arguments.model, "device": str(model.device),
                          "dtype": str(model.dtype).removeprefix("torch."),
                          "preset": arguments.preset, "config": asdict(config), "retain": retain,
                          "sampling": asdict(sampling), "prompts": summaries}), file=sys.stderr)
    return max(codes)


def main(argv=None):
    """Run the command line; returns the exit code."""
    sys.stderr = sys.stderr or open(os.devnull, "w")                        # closed: print would turn to stdout
    try:
        with one_line_errors():
            if sys.stdout is None:
                raise ValueError("standard output is closed")
            sys.stdout.reconfigure(errors="backslashreplace")               # for what its encoding lacks
            code = work(parser().parse_args(argv))
            sys.stdout.flush()                                              # a full disk is noticed here
            return code
    except BrokenPipeError:
        # Whoever read our text has gone: nothing more can be said there, and Python's own flush must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
