"""The shipped checkpoint and the text it was trained on: what benchmarks and examples rely on."""
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import model as qwen3
from sfi import SFIConfig, generate
from tiny import text, train

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_a_seed_always_gives_the_same_document():
    once, again = (text.make_document(7, 1000, "scattered", questions=3) for _ in range(2))
    assert once == again != text.make_document(8, 1000, "scattered", questions=3)
    assert text.make_document(19, 1000, "clustered").prompt == (ROOT / "examples/1k.txt").read_text()


@pytest.mark.parametrize("layout", text.LAYOUTS)
def test_values_stand_in_the_body_and_facts_stand_together_only_if_clustered(layout):
    together = []
    for seed in range(20):
        document = text.make_document(seed, 2000, layout)
        values = [document.answer[start:end] for start, end in document.values]
        assert len(values) in (10, 20) and all(value in document.body for value in values)
        for name in document.people:            # the paragraphs that tell of the animal and of the music
            told = [i for i, paragraph in enumerate(document.body.splitlines()) for kind in ("animal", "music")
                    if any(wording.replace("{N}", name).split("{")[0] in paragraph
                           for wording in text.FACTS[kind][1])]
            assert len(told) == 2
            together.append(told[0] == told[1])
    assert all(together) if layout == "clustered" else sum(together) < len(together) / 2


def test_an_answer_is_counted_value_by_value():
    turn = text.make_document(3, 1000, "clustered").turns[0]
    assert all(text.right_values(turn, turn.answer))
    (start, end), whole = turn.values[4], turn.answer
    wrong = text.right_values(turn, whole[:start] + "99" + whole[end:])
    assert [i for i, right in enumerate(wrong) if not right] == [4]
    assert text.right_values(turn, "").count(True) == 0
    assert text.right_values(turn, whole.split(". ")[0] + ".") == [True, True] + [False] * (len(turn.values) - 2)


@pytest.mark.parametrize("length", [1000, 2000, 4000, 8000])
def test_documents_have_about_the_tokens_asked_for_and_spans_become_tokens(tokenizer, length):
    document = text.make_document(length, length, "scattered")
    encoding = tokenizer.encode(document.prompt + document.answer)
    assert abs(len(encoding.ids) / length - 1) < 0.06
    assert encoding.ids[: len(tokenizer.encode(document.prompt).ids)] == tokenizer.encode(document.prompt).ids
    for (start, end), tokens in zip(document.values, text.value_tokens(document, encoding.offsets)):
        assert tokenizer.decode([encoding.ids[i] for i in tokens]).strip() == document.answer[start:end]


def test_unfit_documents_are_refused():
    with pytest.raises(ValueError, match="heaped"):
        text.make_document(0, 1000, "heaped")
    with pytest.raises(ValueError, match="40 people do not fit into 1000 tokens"):
        text.make_document(0, 1000, "scattered", people=40)


def test_sentence_ends_are_single_tokens(tokenizer):
    for end in (".", "?", "!", ".\n", ".\n\n", "?\n", '."', '?"', '!"'):
        assert len(tokenizer.encode(end).ids) == 1
    for token in train.SPECIAL + train.THINK:
        assert len(tokenizer.encode(token).ids) == 1


def test_the_conversation_form_is_the_chat_template(tokenizer):
    document = text.make_document(5, 1000, "scattered")
    for thinking in (True, False):
        prompt = qwen3.Tokenizer(TINY).chat([{"role": "user", "content": document.prompt}], thinking=thinking)
        assert document.chat.startswith(prompt) and prompt.endswith("</think>\n\n") != thinking


def test_training_computes_what_the_decoder_computes(tmp_path):
    config = dict(json.loads((TINY / "config.json").read_text()), hidden_size=48, intermediate_size=80,
                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(0)
    weights = train.initial_weights(config, "cpu")
    for weight in weights.values():
        weight.copy_((weight + 0.1 * torch.randn_like(weight)).bfloat16())
    train.save(weights, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    decoder = train.Decoder(config, weights, torch.float32)
    ids = torch.randint(0, 2048, (2, 40))
    ours = decoder.logits(decoder.hidden(ids)).unflatten(0, (2, 40))
    loaded = qwen3.load(tmp_path, dtype=torch.float32)
    for row, expected in zip(ids, ours):
        torch.testing.assert_close(loaded.logits(row), expected, atol=1e-4, rtol=1e-4)


def test_the_shipped_model_is_small_and_answers_an_example():
    assert (TINY / "model.safetensors").stat().st_size <= 16_777_216
    loaded = qwen3.load(TINY, dtype=torch.float32)
    turn = text.make_document(19, 1000, "clustered").turns[0]
    prompt = loaded.tokenizer.encode((ROOT / "examples/1k.txt").read_text())
    written = loaded.tokenizer.decode(generate(loaded, prompt, SFIConfig(), mode="full", max_new_tokens=160).ids)
    right = text.right_values(turn, written)
    assert sum(right) >= 0.9 * len(right)
