"""tokenizer.json as onnxruntime-genai reads it. Risk: ids unlike the ones the model was trained with, without an error.

The oracles are written out here: byte-level BPE by rank of merges, SentencePiece BPE by score of the result.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from models_support import TinyShape, byte_tokens, smollm2_path, write_tiny_gguf

from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.gguf_reader import GGUFFile
from octavo.tokenizer import Vocabulary

ASCII_TEXTS = (
    "Hello, world!",
    "The year 2024 had 366 days; 1,000,000 is a million.",
    "  two spaces, a tab\tand\n\nnew lines  \n",
    "def f(x):\n    return {'a': x[0]**2, \"b\": None}",
    "I'll say it's he'd've'nt",
    "<|im_start|>user\nhi<|im_end|>\n",
)
UNICODE_TEXTS = ("Grüße, naïve café!", "数学と日本語", "emoji 😀👩‍👩‍👧 end", "العربية", "a\u00a0b\u2009c", "ﬁ ½ ²")


def genai_tokenizer(folder: Path) -> object:
    import onnxruntime_genai as og

    return og.Tokenizer(og.Config(str(folder)))


def merge_all(parts: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Joins the neighbours of the lowest rank, leftmost first, until none has a rank."""
    while len(parts) > 1:
        pairs = [(rank[pair], index) for index, pair in enumerate(itertools.pairwise(parts)) if pair in rank]
        if not pairs:
            break
        _, index = min(pairs)
        parts = [*parts[:index], parts[index] + parts[index + 1], *parts[index + 2 :]]
    return parts


def byte_level_ids(file: GGUFFile, text: str, digits: bool) -> list[int]:
    """GPT-2's rules on ASCII text; with `digits`, every digit stands alone."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(file.metadata["tokenizer.ggml.merges"])}
    specials = [tokens[i] for i in np.flatnonzero(file.metadata["tokenizer.ggml.token_type"] == 3)]
    alphabet = byte_tokens()
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, specials)) + ")", text):
        if part in specials:
            found.append(ids[part])
            continue
        for piece in re.split(r"(\d)", part) if digits else [part]:
            for word in re.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+", piece):
                symbols = [alphabet[byte] for byte in word.encode()]
                found += [ids[token] for token in merge_all(symbols, ranks)]  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of SmolLM2 with the tokenizer only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with GGUFFile(smollm2_path()) as file:
        write_tokenizer(folder, Vocabulary(file, 49152))
    return folder


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer_json()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(vocabulary.tokenizer_config()), encoding="utf-8")
    model = {
        "type": "llama",
        "vocab_size": len(vocabulary.tokens),
        "eos_token_id": vocabulary.eos,
        "context_length": 64,
    }
    decoder = {"filename": "model.onnx", "head_size": 8, "hidden_size": 8, "num_attention_heads": 1}
    decoder |= {"num_key_value_heads": 1, "num_hidden_layers": 1}
    (folder / "genai_config.json").write_text(json.dumps({"model": {**model, "decoder": decoder}, "search": {}}))


def test_smollm2_ids_follow_its_merges(smollm2: Path) -> None:
    tokenizer = genai_tokenizer(smollm2)
    with GGUFFile(smollm2_path()) as file:
        for text in ASCII_TEXTS:
            assert list(tokenizer.encode(text)) == byte_level_ids(file, text, digits=True), text  # type: ignore[attr-defined]


def test_texts_survive_a_round_trip(smollm2: Path) -> None:
    tokenizer = genai_tokenizer(smollm2)
    for text in (*ASCII_TEXTS[:-1], *UNICODE_TEXTS):
        assert tokenizer.decode(tokenizer.encode(text)) == text  # type: ignore[attr-defined]


def test_unicode_agrees_with_the_tokenizers_package(smollm2: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    theirs = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ours = genai_tokenizer(smollm2)
    for text in (*ASCII_TEXTS, *UNICODE_TEXTS):
        assert list(ours.encode(text)) == theirs.encode(text).ids, text  # type: ignore[attr-defined]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "starcoder", "qwen2", "gpt-4o"])
def test_other_ways_of_cutting_agree_too(tmp_path: Path, pre: str) -> None:
    """Not what this vocabulary was trained with, but a real vocabulary to cut with."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    with GGUFFile(smollm2_path()) as file:
        file.metadata["tokenizer.ggml.pre"] = pre
        write_tokenizer(tmp_path, Vocabulary(file, 49152))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = genai_tokenizer(tmp_path)
    for text in (*ASCII_TEXTS, *UNICODE_TEXTS):
        assert list(ours.encode(text)) == theirs.encode(text).ids, text  # type: ignore[attr-defined]


def test_chat_template(smollm2: Path) -> None:
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    prompt = genai_tokenizer(smollm2).apply_chat_template(messages=messages, add_generation_prompt=True)  # type: ignore[attr-defined]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") and "system" in prompt


class TestSentencePiece:
    """A vocabulary as Llama 2's: scores, byte tokens, a space before the text, a begin token."""

    WORDS = (
        "he",
        "ll",
        "hell",
        "hello",
        "lo",
        "wor",
        "ld",
        "world",
        "or",
        "\u2581h",
        "\u2581he",
        "\u2581hello",
        "\u2581w",
    )

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
        pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
        pieces += [(word, -float(rank), 1) for rank, word in enumerate(self.WORDS)]
        pieces += [(letter, -100.0 - rank, 1) for rank, letter in enumerate("\u2581abcdehlorw,.")]
        write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape(vocab=len(pieces)))
        old = gguf.GGUFReader(tmp_path / "tiny.gguf")
        writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
        for key, field in old.fields.items():
            if key.startswith("llama."):
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece for piece, _, _ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for tensor in old.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        convert(tmp_path / "spm.gguf", tmp_path / "model")
        return tmp_path

    def oracle(self, folder: Path, text: str) -> list[int]:
        """Repeatedly joins the two neighbours whose result scores highest; what is unknown becomes bytes."""
        with GGUFFile(folder / "spm.gguf") as file:
            tokens, scores = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.scores"]
            kinds = file.metadata["tokenizer.ggml.token_type"]
        ids = {token: index for index, token in enumerate(tokens)}
        parts = list("\u2581" + text.replace(" ", "\u2581"))
        while True:
            joined = [
                (-float(scores[ids[a + b]]), index)
                for index, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in ids and kinds[ids[a + b]] == 1
            ]
            if not joined:
                break
            index = min(joined)[1]
            parts = [*parts[:index], parts[index] + parts[index + 1], *parts[index + 2 :]]
        found = [1]
        for part in parts:
            found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return found

    @pytest.mark.parametrize("text", ["hello world", "he world, hello.", "a  b", "hellohello", "héllo ß", "world"])
    def test_ids_and_round_trip(self, folder: Path, text: str) -> None:
        tokenizer = genai_tokenizer(folder / "model")
        tokenizer.update_options(add_special_tokens="true")  # type: ignore[attr-defined]
        ids = list(tokenizer.encode(text))  # type: ignore[attr-defined]
        assert ids == self.oracle(folder, text)
        assert tokenizer.decode(ids) == text  # type: ignore[attr-defined]


def test_unsupported_tokenizers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, TinyShape())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"gpt-2", b"gpt-9"))
    with pytest.raises(OctavoError, match=r"'gpt-9'.*smollm"):
        convert(path, tmp_path / "out")
    path.write_bytes(data.replace(b"gpt2", b"bert"))
    with pytest.raises(OctavoError, match=r"'bert'.*gpt2 and llama"):
        convert(path, tmp_path / "out")
    path.write_bytes(data.replace(b"\xc4\xa0t he", b"\xc4\xa0t hh"))
    with pytest.raises(OctavoError, match="merge 2 "):
        convert(path, tmp_path / "out")
