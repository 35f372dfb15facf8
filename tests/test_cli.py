"""The command line as a user meets it: text on stdout, the rest on stderr, bad input in one line and exit 2.

Runs that must show separation of streams, signals and imports are subprocesses; the rest call cli.main.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import cli

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "1k.txt"


def start(*arguments, **options):
    # Ctrl-C must reach it even where these tests run in the background of a shell, which makes children ignore it.
    options.setdefault("preexec_fn", partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen([sys.executable, str(ROOT / "sfi.py"), *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, cwd=options.pop("cwd", ROOT), **options)


def shell(*arguments, input=None, **options):
    process = start(*arguments, stdin=subprocess.PIPE, **options)
    out, err = process.communicate(input, timeout=300)
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("The mill stood by the river. It was cold! Was it late?\n" * 12)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A copy of the shipped checkpoint that a test may damage."""
    def copy(name):
        folder = tmp_path_factory.mktemp(name)
        for path in (ROOT / "tiny").iterdir():
            if path.suffix in (".json", ".safetensors"):
                shutil.copy(path, folder)
        return folder
    return copy


def test_the_main_command_prints_both_texts_and_the_table(tmp_path):
    # From another folder, and with Triton out of reach: the CPU's path must not need it.
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('Triton is out of reach')")
    code, out, err = shell("--prompt", EXAMPLE, "--device", "cpu", "--json", cwd=tmp_path,
                           env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert code == 0, err
    answer = (ROOT / "examples" / "1k.answer.txt").read_text().strip()
    assert out.startswith("Full KV\n-------\n") and "\nSFI\n---\n" in out
    full = out.split("-------\n")[1].split("\nSFI\n")[0].strip()
    assert full == answer
    for words in ("preset robust", "915 prompt tokens", "slow steps", "KV read", "top-1 agreement", "kept mass"):
        assert words in err
    report = json.loads(err.splitlines()[-1])
    assert report["preset"] == "robust" and report["retain"] == 0.15
    only = report["prompts"][0]
    assert report["config"]["selected"] == round(0.15 * only["prompt_tokens"])
    assert only["full_new_tokens"] == only["slow_steps"] + only["fast_steps"] + 1 \
        or only["first_differing_token"] is not None
    assert 0 < only["kv_read"] < 1 and 0 <= only["agreement"] <= 1 and only["kl"] >= 0


def test_single_modes_print_the_text_alone(capsys, prompt):
    texts = {}
    for mode in ("full", "sfi"):
        assert cli.main(["--prompt", str(prompt), "--mode", mode, "--max-new-tokens", "12", "--device", "cpu"]) == 0
        texts[mode], err = capsys.readouterr()
        assert "Full KV" not in texts[mode] and "tokens/s" in err
    assert cli.main(["--prompt", str(prompt), "--max-new-tokens", "12", "--device", "cpu"]) == 0
    both = capsys.readouterr().out
    assert both == f"Full KV\n-------\n{texts['full']}\nSFI\n---\n{texts['sfi']}"


def test_every_flag_is_taken(capsys, prompt):
    flags = """--mode sfi --device cpu --dtype float64 --max-new-tokens 9 --json --raw --preset paper --selected 20
        --sink 2 --recent 16 --refresh-interval 3 --min-gap 2 --policy interval --evidence-queries 2
        --bootstrap-queries 4
        --doubt 0.2 --doubt-gap 2 --alpha 1 --gamma 0.4 --weight-norm 0.9 --weight-position 0.6 --position-power 1.5
        --position-eta 0.3
        --theta 0.5 --p 0.8 --lambda-cap-single 0.3 --lambda-cap-multi 0.2 --nms-window 8 --nms-alpha 0.7
        --exclusivity-alpha 0.5 --exclusivity-temperature 1.5 --eps 1e-10 --spread 3 --temperature 0.7 --top-k 20
        --top-p 0.9 --min-p 0.01 --seed 5""".split()
    assert cli.main(["--prompt", str(prompt), "--model", str(ROOT / "tiny"), *flags]) == 0
    report = json.loads(capsys.readouterr().err.splitlines()[-1])
    said = {**report["config"], **report["config"].pop("selector"), **report["sampling"]}
    for flag, value in zip(flags[flags.index("--selected")::2], flags[flags.index("--selected") + 1::2]):
        assert str(said[flag[2:].replace("-", "_")]) in (value, f"{float(value) if value[0].isdigit() else value}")
    assert (report["dtype"], report["retain"], report["preset"]) == ("float64", None, "paper")


def test_a_trace_is_written_and_verifies_and_a_figure_is_drawn(capsys, prompt, tmp_path):
    pytest.importorskip("matplotlib")
    trace, figure = tmp_path / "t.safetensors", tmp_path / "t.png"
    common = ["--prompt", str(prompt), "--mode", "sfi", "--max-new-tokens", "12", "--device", "cpu"]
    assert cli.main([*common, "--trace", str(trace), "--trace-depth", "tensors", "--trace-layers", "1:3",
                     "--trace-steps",
                     "0:4", "--plot", str(figure)]) == 0
    assert figure.read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()
    assert cli.main(["--verify", str(trace), "--device", "cpu"]) == 0
    assert "equal within tolerance" in capsys.readouterr().out
    tensors = load_file(trace)
    with safe_open(trace, "pt") as file:
        metadata = file.metadata()
    name = next(name for name in tensors if "attention" in name)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, trace, metadata)
    assert cli.main(["--verify", str(trace), "--device", "cpu"]) == 1
    assert "attention" in capsys.readouterr().out


def test_a_preset_may_have_a_share_of_its_own(capsys, prompt):
    for flags, share in ((["robust-doubt"], 0.02), (["robust-doubt", "--retain", "0.1"], 0.1), (["paper"], 0.15)):
        assert cli.main(["--prompt", str(prompt), "--mode", "sfi", "--max-new-tokens", "2", "--device", "cpu", "--json",
                         "--preset", *flags]) == 0
        report = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert report["retain"] == share
        assert report["config"]["selected"] == round(share * report["prompts"][0]["prompt_tokens"])
    assert cli.main(["--prompt", str(prompt), "--mode", "sfi", "--max-new-tokens", "2", "--device", "cpu", "--json",
                     "--preset", "robust-doubt", "--selected", "7"]) == 0
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["config"]["selected"] == 7


def test_help_is_grouped_and_shows_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for words in ("run:", "Slow-Fast Inference:", "Selector:", "sampling:", "(default: robust)", "(default: 0.15)",
                  "(paper: 64)"):
        assert words in out


def test_chat_uses_the_template(capsys, prompt):
    for flags in ([], ["--no-thinking"]):
        assert cli.main(["--prompt", str(prompt), "--chat", *flags, "--mode", "full", "--max-new-tokens", "2",
                         "--device",
                         "cpu", "--json"]) == 0
        tokens = json.loads(capsys.readouterr().err.splitlines()[-1])["prompts"][0]["prompt_tokens"]
        if not flags:
            thinking = tokens
    assert tokens > thinking                                # an empty thought is written for the model


def test_standard_input_and_a_batch(prompt, capsys):
    code, alone, _ = shell("--prompt", "-", "--mode", "sfi", "--max-new-tokens", "8", "--selected", "30", "--device",
                           "cpu",
                           input=prompt.read_bytes())
    assert code == 0
    other = prompt.with_name("other.txt")
    other.write_text("Harrow is a town. ")
    assert cli.main(["--prompt", str(prompt), str(other), "--mode", "sfi", "--max-new-tokens", "8", "--selected", "30",
                     "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(alone)


def test_a_broken_pipe_is_no_traceback(prompt):
    process = start("--prompt", prompt, "--max-new-tokens", "60", "--mode", "full", "--device", "cpu")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait() == 1 and "Traceback" not in err and "Error" not in err


def test_text_that_the_output_s_encoding_lacks_is_escaped(prompt):
    flags = "--prompt", prompt, "--max-new-tokens", "60", "--mode", "sfi", "--device", "cpu", "--temperature", "99"
    code, out, err = shell(*flags, env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert code == 0 and not out.isascii(), err
    code, plain, err = shell(*flags, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert code == 0 and plain == out.encode("ascii", "backslashreplace").decode(), err


def test_ctrl_c_ends_with_what_was_written(prompt):
    process = start("--prompt", prompt, "--max-new-tokens", "15000", "--mode", "full", "--device", "cpu",
                    "--temperature", "2")
    assert process.stdout.read(1)                           # it is writing
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith(b"\n")
    assert "interrupted" in err.decode() and "tokens/s" in err.decode() and "Traceback" not in err.decode()


def test_ctrl_c_while_libraries_load(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError")
    assert shell("--help", env=os.environ | {"PYTHONPATH": str(tmp_path)}) == (130, "", "interrupted\n")


@pytest.mark.parametrize("place, kept", [("fidelity.compare", "KV read"), ("traces.save", "kept mass")])
def test_ctrl_c_after_the_texts_keeps_their_numbers(capsys, prompt, tmp_path, monkeypatch, place, kept):
    def interrupt(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(f"cli.{place}", interrupt)
    trace = tmp_path / "trace"
    assert cli.main(["--prompt", str(prompt), "--max-new-tokens", "3", "--device", "cpu", "--trace", str(trace)]) == 130
    out, err = capsys.readouterr()
    assert "SFI" in out and kept in err and err.endswith("\ninterrupted\n") and not trace.exists()


def refused(capsys, arguments, *words):
    """One line on stderr that holds the words, nothing on stdout, exit 2."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1, err
    for word in words:
        assert str(word) in err


@pytest.mark.parametrize("content, word", [(b"", "empty"), (b" \n\t\n", "blank"), ("\ufeff\u200b\n".encode(), "blank"),
                                           (b"caf\xe9", "UTF-8")])
def test_bad_prompt_files(capsys, tmp_path, content, word):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    refused(capsys, ["--prompt", path], path, word)


def test_a_prompt_that_is_missing_or_a_folder(capsys, tmp_path):
    refused(capsys, ["--prompt", tmp_path / "none.txt"], "none.txt", "No such file")
    refused(capsys, ["--prompt", tmp_path], "directory")


@pytest.mark.parametrize("flags, words", [
    (["--sink", "-1"], ["sink", "-1"]), (["--selected", "-5"], ["selected", "-5"]),
    (["--alpha", "nan"], ["alpha", "nan"]),
    (["--theta", "0"], ["theta"]), (["--doubt", "inf"], ["doubt", "inf"]), (["--retain", "1.5"], ["retain", "1.5"]),
    (["--retain", "nan"], ["retain", "nan"]), (["--evidence-queries", "0"], ["evidence_queries", "0"]),
    (["--retain", "0.1", "--selected", "9"], ["--retain", "--selected"]), (["--preset", "best"], ["preset", "best"]),
    (["--policy", "often"], ["policy", "often"]), (["--temperature", "-1"], ["temperature", "-1"]),
    (["--temperature", "nan"], ["temperature"]), (["--temperature", "inf"], ["temperature"]),
    (["--top-k", "-1"], ["top_k"]),
    (["--top-p", "0"], ["top_p"]), (["--min-p", "2"], ["min_p"]), (["--max-new-tokens", "0"], ["max_new_tokens", "0"]),
    (["--max-new-tokens", "99999"], ["99999", "16384"]), (["--chat", "--raw"], ["--raw", "--chat"]),
    (["--no-thinking"], ["--no-thinking", "--chat"]), (["--device", "tpux"], ["tpux"]),
    (["--device", "meta"], ["meta"]),
    (["--bogus"], ["--bogus"]),
    (["--model", "/nowhere"], ["/nowhere"]), (["--sink", "two"], ["--sink", "two"]), (["--mode", "half"], ["half"]),
    (["--sin", "2"], ["--sin"]), (["--trace", "/nowhere/t"], ["/nowhere"]),
    (["--trace-layers", "3"], ["--trace-layers", "A:B"]),
    (["--trace", "t", "--trace-layers", "7:9"], ["layers 7:9", "0:8"]),
    (["--mode", "full", "--trace", "t"], ["--trace"]), (["--verify", "none.safetensors"], ["--verify", "--prompt"])])
def test_bad_flags(capsys, prompt, flags, words):
    refused(capsys, ["--prompt", prompt, *flags], *words)


def test_outputs_that_cannot_be_written_are_refused_before_the_work(capsys, prompt, tmp_path):
    pytest.importorskip("matplotlib")
    for flags, word in ((["--trace", prompt], "the prompt"), (["--trace", "/dev/null"], "/dev/null"),
                        (["--plot", tmp_path], "file"), (["--plot", ""], "--plot"), (["--plot", "a.xyz"], "png"),
                        (["--plot", "a.png", "--max-new-tokens", "2"], "at least 3"),
                        (["--plot", "a.png", "--trace", "a.png"], "file of --plot"),
                        (["--trace-steps", "0:3"], "need --trace")):
        refused(capsys, ["--prompt", prompt, *flags], word)
    assert prompt.read_text()


@pytest.mark.parametrize("broken", [{"traces.record"}, {"plot.draw"}, {"traces.record", "plot.draw"}])
def test_an_output_that_fails_costs_no_other(capsys, prompt, tmp_path, monkeypatch, broken):
    def fail(*_, **__):
        raise OSError(28, "No space left on device", "here")
    monkeypatch.setattr("plot.check_ending", lambda *_: None)               # which needs matplotlib
    monkeypatch.setattr("plot.draw", lambda *arguments: Path(arguments[-1]).write_text("drawn"))
    for place in broken:
        monkeypatch.setattr(place.replace("traces", "trace"), fail)
    trace, figure = tmp_path / "t.safetensors", tmp_path / "t.png"
    assert cli.main(["--prompt", str(prompt), "--mode", "sfi", "--max-new-tokens", "4", "--device", "cpu", "--json",
                     "--trace", str(trace), "--plot", str(figure)]) == 2
    err = capsys.readouterr().err
    assert (trace.exists(), figure.exists()) == ("traces.record" not in broken, "plot.draw" not in broken)
    assert err.count("sfi: here: No space left on device\n") == len(broken) and json.loads(err.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no file")
def test_a_folder_that_takes_no_file_is_refused_before_the_work(capsys, prompt):
    refused(capsys, ["--prompt", prompt, "--trace", "/proc/x"], "--trace /proc/x cannot be written")


def test_a_link_and_a_mode_outlive_a_new_trace(prompt, tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    assert cli.main(["--prompt", str(prompt), "--mode", "sfi", "--max-new-tokens", "3", "--device", "cpu",
                     "--trace", str(link)]) == 0
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640 and len(load_file(target))


def test_a_prompt_or_a_trace_is_needed(capsys, tmp_path):
    refused(capsys, [], "--prompt")
    refused(capsys, ["--verify", tmp_path / "none.safetensors"], "none.safetensors")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_when_asked_for(capsys, prompt):
    refused(capsys, ["--prompt", prompt, "--device", "cuda"], "cuda")


def test_damaged_checkpoints(capsys, prompt, checkpoint):
    def damaged(name, damage, *words):
        folder = checkpoint(name)
        damage(folder)
        refused(capsys, ["--prompt", prompt, "--model", folder], *words)

    weights = "model.safetensors"
    damaged("gone", lambda f: (f / weights).unlink(), weights)
    damaged("cut", lambda f: (f / weights).write_bytes((f / weights).read_bytes()[:100_000]), weights)
    damaged("json", lambda f: (f / "config.json").write_text("{"), "config.json", "JSON")
    damaged("index", lambda f: ((f / weights).unlink(), (f / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "part-1.safetensors"}}))), "part-1.safetensors")
    damaged("bare", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json")

    def drop(folder):
        tensors = load_file(folder / weights)
        del tensors["model.norm.weight"]
        save_file(tensors, folder / weights)
    damaged("drop", drop, "model.norm.weight")


def test_a_template_that_raises(capsys, prompt, checkpoint):
    folder = checkpoint("template")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    refused(capsys, ["--prompt", prompt, "--model", folder, "--chat"], "no users here")


@pytest.mark.parametrize("program, argv, said", [
    ("plot.py", ["--output", "x.xyz"], "--output must end in"),
    ("plot.py", ["--documents", "0"], "--documents must be"),
    ("bench/cpu.py", ["--lengths", "0"], "--lengths and"), ("bench/cpu.py", ["--lengths", "x"], "--lengths"),
    ("bench/cpu.py", ["--output", "x.md"], "FILE.json"), ("bench/cpu.py", ["--lengths", "99999"], "no document"),
    ("bench/cpu.py", ["--model", "golden/qwen3/dense-tied"], "has no tokenizer.json"),
    ("bench/quality.py", ["best"], "invalid choice"), ("bench/cpu.py", ["--retain", "-1"], "--retain from 0 to 1"),
    ("golden/make_traces.py", ["nope"], "not 'nope'")])
def test_the_other_programs_refuse_in_one_line_too(program, argv, said):
    if program == "plot.py":
        pytest.importorskip("matplotlib")
    run = subprocess.run([sys.executable, ROOT / program, *argv], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1 and run.stdout == "" and said in run.stderr and run.stderr.count("\n") == 1


def test_standard_streams_that_are_closed_or_full():
    command = f"{sys.executable} {ROOT / 'sfi.py'} --model {ROOT / 'tiny'} --device cpu --mode sfi --max-new-tokens 3"
    closed = subprocess.run(f"{command} --prompt - <&-", shell=True, capture_output=True, text=True)
    assert closed.returncode == 2 and closed.stderr == "sfi: standard input is closed\n"
    closed = subprocess.run(f"echo once | {command} --prompt - >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert closed.returncode == 2 and closed.stderr == "sfi: standard output is closed\n"
    no_stderr = subprocess.run(f"echo once | {command} --prompt - --json 2>&-", shell=True, capture_output=True,
                               text=True)
    assert no_stderr.returncode == 0 and "tokens/s" not in no_stderr.stdout
