"""Derive this folder's files from the released Qwen3 tokenizer (Apache-2.0): python make.py FOLDER

Writes, beside itself, a tokenizer.json with the first merges and all that the vectors need, a copy of
tokenizer_config.json, and vectors.json: texts and chats with their ids, the chats rendered by Hugging Face's own code,
and the ids of every token of the released vocabulary that ends a sentence. Tokens keep their released ids, so the
vectors hold for both. Needs transformers; the tests do not.
"""
import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

from transformers import AutoTokenizer

MERGES = 1500
TEXTS = [
    "Hello, world! It costs 3.14 dollars, e.g. at www.example.com ... or not?\n\nNo.\n",
    '"Really?" she said. (He did.) "Go!"\r\n\tThen what…',
    "\u4f60\u597d\u3002\u4f60\u662f\u8c01\uff1f\u597d\uff01\n",
    "\ud55c\uad6d\uc5b4 \ub744\uc5b4\uc4f0\uae30 \ubf55",
    "\U0001f600\U0001f9d1\u200d\U0001f680 emoji, na\u00efve caf\u00e9.",
    "e\u0301 is normalised to one character",
    "<think>\nA thought.\n</think>\n\nAn answer.<|im_end|>\n<|endoftext|>",
    "x = [1, 2]; if (x?.y !== '.') { return `a.b`; } ?>  <?php",
]
CHATS = [
    [{"role": "user", "content": "Who are you? <b>\"\u4f60\"</b>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"},
     {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOne."}, {"role": "user", "content": "Two? /no_think"}],
]
NEAR_MISSES = [".com", "?>", ".\\", ".get", "?\"><", ".,", ";", ")", "\"", "?page", "!=", "!==", ".'/", ".org"]


def main(folder):
    here = Path(__file__).parent
    released = AutoTokenizer.from_pretrained(folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    merges = [tuple(m) for m in data["model"]["merges"]]
    made_from = {"".join(m): m for m in merges}

    characters = map(chr, range(sys.maxunicode + 1))
    closers = "".join(re.escape(c) for c in characters if unicodedata.category(c) in ("Pe", "Pf"))
    ends_sentence = re.compile(rf".*[.?!\u3002\uff1f\uff01\u2026][\s\"'{closers}]*", re.DOTALL)
    ends = [id for id in vocab.values() if ends_sentence.fullmatch(released.decode([id]))]
    texts = [{"text": text, "ids": released.encode(text)} for text in TEXTS]
    chats = []
    for messages in CHATS:
        for thinking in (True, False):
            text = released.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                enable_thinking=thinking)
            chats.append({"messages": messages, "thinking": thinking, "text": text, "ids": released.encode(text)})

    spelling = {id: text for text, id in vocab.items()}
    wanted = ["".join(m) for m in merges[:MERGES]] + [text for text in vocab if len(text) == 1]
    wanted += [spelling[id] for entry in texts + chats for id in entry["ids"] if id in spelling]
    wanted += [spelling[id] for id in ends]
    wanted += [spelling[id] for text in NEAR_MISSES for id in released.encode(text)]
    kept = set()
    while wanted:                                                           # and what each is merged from
        text = wanted.pop()
        if text not in kept:
            kept.add(text)
            wanted += made_from.get(text, ())
    data["model"]["vocab"] = {text: id for text, id in vocab.items() if text in kept}
    # Listed in the vocabulary too, or the library would give the added tokens ids of its own.
    data["model"]["vocab"] |= {token["content"]: token["id"] for token in data["added_tokens"]}
    data["model"]["merges"] = [m for m in merges if "".join(m) in kept]

    def write(name, value):
        (here / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")

    write("tokenizer.json", data)
    write("vectors.json", {"texts": texts, "chats": chats, "sentence_ends": sorted(ends)})
    shutil.copyfile(folder / "tokenizer_config.json", here / "tokenizer_config.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
