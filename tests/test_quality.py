"""The promises of bench/quality.py and plot.py: fair budgets, exact doubt, repeatable numbers, telling figures.

The model is random and tiny: what is tested is the measuring. Values right belong to the shipped checkpoint.
"""
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))                # last: its files must not stand before the project's

import cpu
import model as qwen3
import quality
import text
from quality import EVIDENCE, EXACT, FULL, PAPER, RECENCY, ROBUST
from sfi import RETAINS, SFIConfig, generate, read_prompts

SMALL = dict(recent=16, min_gap=4, refresh_interval=12)


@pytest.fixture(scope="module")
def tiny():
    """A random Qwen3 with the shipped tokenizer."""
    config = qwen3.Config(vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=4,
                          num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True)
    model = qwen3.Qwen3.random(config)
    model.tokenizer = qwen3.Tokenizer(ROOT / "tiny", 2048)
    model.stop_ids = model.tokenizer.stop_ids
    return model


@pytest.fixture(scope="module")
def case(tiny):
    return quality.documents(tiny, [400], 1, 700_000)[0]


def small(*methods):
    return [replace(m, knobs=m.knobs | SMALL) for m in methods]


def steps_of(model, case, method):
    full, logits, _ = read_prompts(model, [case.prompt], SFIConfig(), len(case.forced))
    with torch.inference_mode():
        return quality.forced_run(model, full, logits, method.config(len(case.prompt)), method, case,
                                  model.tokenizer.sentence_tokens(), False)


# Budgets

def test_controls_of_equal_budget_read_as_much_in_every_step(tiny, case):
    runs = [[(r.kind, r.read) for r in steps_of(tiny, case, m)[1]]
            for m in small(ROBUST, PAPER, RECENCY, EVIDENCE, EXACT)]
    assert {kind for kind, _ in runs[0]} == {"slow", "fast"}
    assert all(run == runs[0] for run in runs)


def test_even_steps_are_as_many_as_the_sentence_rule_s(tiny, case):
    [sentences] = small(ROBUST)
    even = replace(sentences, name="even", like="robust")
    row = quality.run_case(tiny, case, [sentences, even], {}, watched=False)
    assert row["robust"]["slow"] == row["even"]["slow"]
    assert set(row["robust"]["reasons"]) > set(row["even"]["reasons"]) == {"interval"}


def test_a_budget_is_what_the_first_fast_step_reads(tiny, case):
    for budget in (0.1, 0.3, 0.5):
        records = steps_of(tiny, case, replace(ROBUST, budget=budget))[1]
        assert abs(records[1].read - 1 - budget * len(case.prompt)) <= 1


def test_recency_selects_the_latest_candidates(tiny, case):
    [method] = small(RECENCY)
    config = method.config(len(case.prompt))
    full, _, _ = read_prompts(tiny, [case.prompt], config, 1)
    with torch.inference_mode():
        memory = quality.Recency(tiny, full, config)
        memory.start()
    assert (memory.positions == torch.arange(memory.edges[0] - config.selected, memory.edges[0])).all()


def test_exact_holds_the_top_of_each_step_s_own_attention(tiny, case):
    [method] = small(EXACT)
    row = quality.run_case(tiny, case, small(EXACT, ROBUST), {})
    recall = {name: row[name]["recall"][0] / row[name]["recall"][1] for name in (EXACT.name, "robust")}
    kept = {name: row[name]["kept"][0] / row[name]["kept"][1] for name in (EXACT.name, "robust")}
    assert recall[EXACT.name] > 0.999 > recall["robust"] and kept[EXACT.name] > kept["robust"]
    assert row[EXACT.name]["read"][0] == row[EXACT.name]["read"][1] > row[EXACT.name]["attended"][0]


# Doubt

def test_doubt_at_one_says_what_full_kv_says(tiny, case):
    [method] = small(replace(ROBUST, knobs=dict(doubt=1.0, doubt_gap=1)))
    said, records, _ = steps_of(tiny, case, method)
    dense, _, _ = steps_of(tiny, case, FULL)
    assert "doubt" in {r.reason for r in records}
    torch.testing.assert_close(said, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gap", [1, 5])
def test_doubt_pays_for_both_passes_and_keeps_its_gap(tiny, case, gap):
    [method] = small(replace(ROBUST, knobs=dict(doubt=1.0, doubt_gap=gap)))
    _, records, _ = steps_of(tiny, case, method)
    doubted = [i for i, r in enumerate(records) if r.reason == "doubt"]
    assert doubted and all(b - a >= gap for a, b in zip(doubted, doubted[1:]))
    config = method.config(len(case.prompt))
    assert all(records[i].read > records[i].length + config.sink + config.selected for i in doubted)
    assert all(r.read <= r.length for r in records if r.reason != "doubt")


@pytest.mark.parametrize("signal", quality.SIGNALS)
def test_a_signal_is_between_zero_and_one_and_its_ends_are_never_and_always(tiny, case, signal):
    slow = []
    for doubt in (1e-9, 1.0):
        [method] = small(replace(ROBUST, knobs=dict(doubt=doubt, doubt_gap=1), signal=signal))
        full, logits, _ = read_prompts(tiny, [case.prompt], SFIConfig(), len(case.forced))
        with torch.inference_mode():
            _, records, _ = quality.forced_run(tiny, full, logits, method.config(len(case.prompt)), method, case,
                                               tiny.tokenizer.sentence_tokens(), True)
        slow.append(sum(r.reason == "doubt" for r in records))
    assert slow[0] == 0 < slow[1]


# Numbers

def test_full_kv_is_at_no_distance_from_itself_and_a_run_repeats(tiny, case):
    first, second = (quality.run_case(tiny, case, small(PAPER), {}) for _ in range(2))
    full = first[FULL.name]
    assert full["kl"][0] == 0 and full["agreement"][0] == full["agreement"][1] == len(case.forced) - 1
    assert full["read"][0] == full["read"][1] and full["free_same"] == (1.0, 1)
    for row in (first, second):
        for cell in row.values():
            del cell["seconds"]
            cell.pop("prefill_seconds", None)
    assert first == second and first["paper"]["kl"][0] > 0


def test_dense_logits_are_those_of_the_uncached_model(tiny, case):
    said, _, _ = steps_of(tiny, case, FULL)
    ids = torch.tensor(case.prompt + case.forced)
    torch.testing.assert_close(said, tiny.logits(ids)[len(case.prompt) - 1 : -1], rtol=0, atol=1e-4)


def test_a_free_run_is_what_generate_writes(tiny, case):
    [method] = small(ROBUST)
    config = method.config(len(case.prompt))
    full, logits, _ = read_prompts(tiny, [case.prompt], config, case.limit)
    with torch.inference_mode():
        ids = quality.free_run(tiny, full, logits, config, method, case, tiny.tokenizer.sentence_tokens())
    assert ids == generate(tiny, case.prompt, config, max_new_tokens=case.limit).ids


def test_a_run_that_agrees_with_its_forced_tokens_is_the_free_run(tiny, case):
    """The free run is then not computed again: what stands for it must be it."""
    full = generate(tiny, case.prompt, SFIConfig(), "full", max_new_tokens=40).ids
    free = replace(case, forced=full, values=[], limit=40)
    row = quality.run_case(tiny, free, small(replace(ROBUST, knobs=dict(doubt=1.0, doubt_gap=1)), PAPER), {})
    assert row["robust"]["agreement"][0] == 39 and row["robust"]["free_same"] == (1.0, 1)
    paper = generate(tiny, case.prompt, small(PAPER)[0].config(len(case.prompt)), max_new_tokens=40).ids
    first = next((i for i, (a, b) in enumerate(zip(paper, full)) if a != b), None)
    assert row["paper"]["free_same"] == (float(first is None), 1)
    assert first is None or row["paper"]["free_first"] == (first, 1)


def test_a_case_s_tokens_are_the_text_and_its_values_are_marked(tiny):
    document = text.make_document(700_001, 400, "scattered")
    [case] = [c for c in quality.documents(tiny, [400], 2, 700_000) if c.name == "400 scattered 700001"]
    assert tiny.tokenizer.decode(case.prompt) == document.prompt
    assert tiny.tokenizer.decode(case.forced, False) == document.answer + text.END
    for (start, end), indices in zip(document.values, case.values):
        assert document.answer[start:end] in tiny.tokenizer.decode([case.forced[i] for i in indices])
    assert case.score(document.answer) == {"free_right": (len(case.values),) * 2, "free_exact": (1.0, 1)}
    assert case.score("")["free_right"] == (0, len(case.values))


def test_the_interval_holds_the_mean_and_needs_no_luck(tmp_path):
    results = quality.Results(tmp_path / "r.json", {}, [])
    results.cells = {str(i): {"full KV": {"group": "8 x"}, "m": {"kl": (i % 5, 1)}} for i in range(100)}
    mean, low, high = results.pooled("m", "kl", "8 ")
    assert mean == 2 and 1.6 < low < mean < high < 2.4 and results.pooled("m", "kl", "8 ") == (mean, low, high)
    assert results.pooled("m", "kl", "4 ") is None and results.pooled("m", "nothing") is None


def test_needle_facts_stand_at_their_depth(tiny):
    places = []
    for depth in (0, 0.5, 1):
        prompt = tiny.tokenizer.decode(quality.needle(tiny, 1500, depth, 5).prompt)
        who = prompt.split("about ")[-1].split("?")[0]
        places.append(prompt.index(who) / prompt.index("Question: "))
    assert places[0] < 0.05 and 0.35 < places[1] < 0.65 and 0.8 < places[2]


def test_sources_say_the_values(tiny):
    for layout in text.LAYOUTS:
        document = text.make_document(700_003, 800, layout)
        encoded = tiny.tokenizer.backend.encode(document.prompt, add_special_tokens=False)
        for place, (start, end) in zip(quality.sources(document, encoded.offsets), document.values, strict=True):
            assert document.answer[start:end] in tiny.tokenizer.decode([encoded.ids[i] for i in place])


# Files

@pytest.fixture
def shipped(tiny, monkeypatch):
    monkeypatch.setattr(quality.qwen3, "load", lambda *_: tiny)
    quality.prepared.cache_clear()
    yield
    quality.prepared.cache_clear()


def test_finished_cells_are_not_computed_again(shipped, tmp_path, monkeypatch, capsys):
    computed, measure = [], quality.measure
    monkeypatch.setattr(quality, "measure", lambda *a: (computed.append((a[5].name, a[4].name)), measure(*a))[1])
    output = str(tmp_path / "m.json")
    run = ["methods", "--lengths", "400", "--documents", "1", "--no-watch", "--output", output, "--methods"]
    quality.main([*run, "paper"])
    assert len(computed) == 4 and json.loads(Path(output).read_text())["cells"].keys() == {name for name, _ in computed}
    shown = capsys.readouterr().out
    computed.clear()
    quality.main([*run, "paper"])
    assert computed == [] and capsys.readouterr().out == shown
    quality.main([*run, "paper", "recency"])
    assert {method for _, method in computed} == {"full KV", "recency"}      # full KV's logits are needed again
    with pytest.raises(ValueError, match="paper.*another --output"):
        quality.main([*run, "paper", "--retain", "0.3"])


def test_long_bench_lines_of_both_shapes_are_scored(shipped, tmp_path, capsys):
    lines = [dict(context="A cat sat. " * 20, input="Who sat?", answers=["a cat", "the cat"]),
             dict(context="A cat sat. " * 20, question="Who sat?", answer="B",
                  **{f"choice_{c}": c * 3 for c in "ABCD"})]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    quality.main(["file", str(tmp_path / "lines.jsonl"), "--max-new-tokens", "8", "--methods", "robust", "recency",
                  "--output", str(tmp_path / "f.json")])
    shown = capsys.readouterr().out
    assert "F1 %" in shown and "choices right %" in shown and shown.count("| recency |") == 2


def test_a_chronicle_s_own_answer_is_the_right_choice(tiny):
    for number, line in enumerate(quality.chronicle_lines(400, 2, 700_000)):
        case = quality.line_case(tiny, number, line, 8, False, True)
        right = line["answers"][0] if "answers" in line else line[f"choice_{line['answer']}"]
        assert all(value == 1 for value, _ in case.score(" " + right).values())
        assert "choice" not in tiny.tokenizer.decode(case.prompt).lower()


def test_robust_with_doubt_is_the_preset(tiny):
    config = quality.SURE.config(4000)
    assert config == SFIConfig.preset("robust-doubt", selected=round(4000 * RETAINS["robust-doubt"]))
    assert config == quality.custom("robust-doubt").config(4000)


def test_results_know_that_a_preset_has_changed(shipped, tmp_path, monkeypatch):
    run = ["methods", "--lengths", "400", "--documents", "1", "--no-watch", "--methods", "robust + doubt", "--output",
           str(tmp_path / "m.json")]
    quality.main(run)
    monkeypatch.setitem(quality.PRESETS, "robust-doubt", quality.PRESETS["robust-doubt"] | dict(doubt=0.9))
    with pytest.raises(ValueError, match="robust . doubt.*another --output"):
        quality.main(run)


def test_a_method_of_one_s_own_has_its_knobs(tiny):
    method = quality.custom("robust,retain=0.3,doubt=0.9,policy=interval,spread=2")
    config = method.config(1000)
    assert (config.selected, config.doubt, config.policy, config.selector.spread, config.evidence_queries) == (
        300, 0.9, "interval", 2, 8)
    for wrong in ("robust,nonsense=1", "none", "robust,recent=-1"):
        with pytest.raises(ValueError):
            quality.custom(wrong)


def test_written_answers_are_scored_as_long_bench_does(tiny):
    line = dict(context="x", input="q", answers=["The grey cat", "dog"])
    score = quality.line_case(tiny, 1, line, 8, False, False).score
    assert score(" a Grey cat!") == {"f1": (1.0, 1), "exact": (1.0, 1)}
    assert score("grey horse")["f1"][0] == pytest.approx(0.5) and score("mouse") == {"f1": (0.0, 1), "exact": (0.0, 1)}
    line = dict(context="x", question="q", answer="B", choice_A="red", choice_B="old blue hat", choice_C="c",
                choice_D="d")
    score = quality.line_case(tiny, 1, line, 8, False, False).score
    assert [score(w)["choice"][0] for w in ("The correct answer is (B).", "B", "an old hat",
                                            "The correct answer is A")] == [
        1, 1, 1, 0]
    with pytest.raises(ValueError, match="line 7 .*answers.*stuff"):
        quality.line_case(tiny, 7, dict(stuff=1), 8, False, False)


def test_a_context_that_does_not_fit_loses_its_middle_aloud(tiny, capsys):
    line = dict(context=" ".join(map(str, range(3000))), input="q", answers=["a"])
    case = quality.line_case(tiny, 3, line, 8, False, False)
    prompt = tiny.tokenizer.decode(case.prompt)
    assert 4000 < len(case.prompt) <= 4096 - 8 and prompt.startswith("0 1 2") and " 2999\n" in prompt
    assert "line 3" in capsys.readouterr().err


# Figures

def painted(path):
    """The fraction of pixels that are not the background."""
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    return (abs(image - image[0, 0]).max(-1) > 0.1).mean()


def test_figures_are_written_and_not_blank(tiny, case, tmp_path):
    pytest.importorskip("matplotlib")
    plot = quality.plot
    full, logits, _ = read_prompts(tiny, [case.prompt], SFIConfig(), len(case.forced))
    [method] = small(ROBUST)
    plot.draw(tiny, full, logits, method.config(len(case.prompt)), case.forced, tmp_path / "steps.png")
    plot.draw_stability(plot.stability(tiny, [(case.prompt, case.forced)],
                                       lambda n: {"paper": SFIConfig(**SMALL, selected=40)}),
                        tmp_path / "stability.png")
    plot.curve({"a": [(0.1, 0.1, 0.1, 0.5, 0.2), (0.5, 0.5, 0.5, 1, 0.1)]}, tmp_path / "curve.png")
    plot.needle({"a": [[0.5, 1.0], [0.2, 0.4]]}, [0, 1], [100, 200], tmp_path / "needle.png")
    for name in ("steps", "stability", "curve", "needle"):
        assert painted(tmp_path / f"{name}.png") > 0.02, name


def test_a_missing_matplotlib_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="^figures need matplotlib.*$"):
        quality.plot.pyplot()


def test_a_trace_tells_slow_steps_sentence_starts_and_what_is_read(tiny, case):
    full, logits, _ = read_prompts(tiny, [case.prompt], SFIConfig(), len(case.forced))
    [method] = small(ROBUST)
    config = method.config(len(case.prompt))
    seen = quality.plot.trace(tiny, full, logits, config, case.forced)
    _, records, _ = steps_of(tiny, case, method)
    assert seen.reasons == [r.reason for r in records[1:]]
    ends, _ = tiny.tokenizer.sentence_tokens()
    assert seen.starts == [i > 0 and case.forced[i - 1] in ends for i in range(len(seen.starts))]
    fast = torch.tensor([r is None for r in seen.reasons])
    assert (seen.kept[fast] <= 1 + 1e-5).all() and seen.kept[~fast].isnan().all() and (seen.reads[~fast] == 1).sum() > 0
    assert seen.overlap[0].isnan().all() and ((seen.overlap[1:] >= 0) & (seen.overlap[1:] <= 1)).all()


def test_results_of_other_inputs_are_never_handed_out(tmp_path, capsys):
    """A file is known by what it holds and not by its name, and every flag that a cell depends on counts."""
    a, b, output = tmp_path / "a.jsonl", tmp_path / "b.jsonl", str(tmp_path / "r.json")
    for path, word in ((a, "one"), (b, "two")):
        path.write_text(json.dumps(dict(context="Ada has a key.", input=f"Who, {word}?", answers=["Ada"])) + "\n")
    run = ["--methods", "paper", "--no-watch", "--max-new-tokens", "2", "--output", output]
    quality.main(["file", str(a), *run])
    for argv in (["file", str(b), *run], ["file", str(a), *run, "--hide-choices"]):
        with pytest.raises(ValueError, match="holds results of another"):
            quality.main(argv)


@pytest.mark.parametrize("argv, said", [
    (["file", "empty.jsonl"], "no lines"), (["file", "list.jsonl"], "list.jsonl, line 1: no JSON object"),
    (["text"], "needs a file"), (["text", "empty.jsonl", "--lengths", "-64"], "--lengths must be"),
    (["needle", "--depths", "nan"], "--depths must be"), (["methods", "--documents", "0"], "--documents must be"),
    (["methods", "--output", "x.md"], "must end in .json"), (["methods", "--output", "none/x.json"], "not a folder"),
    (["methods", "--output", "empty.jsonl.json"], "holds no results"), (["best"], "invalid choice: 'best'"),
    (["methods", "--methods"], "needs --try"),
    (["text", "odd.txt"], "odd.txt is not UTF-8"), (["methods", "--lengths", "x"], "--lengths"),
    (["methods", "--model", str(ROOT / "golden" / "qwen3" / "dense-tied")], "has no tokenizer.json")])
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n")
    Path("list.jsonl").write_text("[1]\n")
    Path("empty.jsonl.json").write_text("{}")
    Path("odd.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=said):
        quality.main(argv)


def test_the_speed_program_has_text_for_the_lengths_it_measures_by_default():
    tokenizer = qwen3.load(ROOT / "tiny").tokenizer
    for length in cpu.LENGTHS:
        prompt, forced = cpu.read(tokenizer, length, 128)
        assert (len(prompt), len(forced)) == (length, 128)
