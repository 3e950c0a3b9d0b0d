"""tokenizer.json and tokenizer_config.json out of a GGUF file's vocabulary.

Two kinds of vocabulary are known: byte-level BPE with merges ("gpt2") and SentencePiece BPE with scores ("llama").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import OctavoError, counted, quoted
from .gguf_reader import GGUFFile, metadata_value, require_finite

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = _BYTE_LEVEL | {"use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = [_split(_LLAMA3_PATTERN), _BYTES_ONLY]
# The files' own tokenizers say Digits and then ByteLevel; onnxruntime-genai 0.18 then takes " ½" for one piece, where
# the tokenizers package cuts before every numeral. Written as two splits, both agree.
_NUMERALS_ALONE = [_split(r"\p{N}"), _split(_GPT2_PATTERN), _BYTES_ONLY]

# tokenizer.ggml.pre -> how text is cut before merging
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": [_split(_QWEN2_PATTERN), _BYTES_ONLY],
    "gpt-4o": [_split(_GPT4O_PATTERN), _BYTES_ONLY],
    "refact": _NUMERALS_ALONE,
    "smollm": _NUMERALS_ALONE,
    "starcoder": _NUMERALS_ALONE,
}

_SPACE = "\u2581"  # SentencePiece's visible space


class Vocabulary:
    """The vocabulary of an open GGUF file, checked.

    Attributes: tokens (id -> text), types (id -> tokenizer.ggml.token_type), and the ids eos, bos, pad, unknown (None
    where the file names none).

    Raises OctavoError where something is missing, inconsistent or of an unsupported kind.
    """

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self._file = file
        self.model = metadata_value(file, "tokenizer.ggml.model", str)
        if self.model not in ("gpt2", "llama"):
            raise OctavoError(
                f"{file.path}: tokenizer {quoted(self.model)} is not supported; supported are gpt2 and llama."
            )
        self.tokens = self._strings("tokenizer.ggml.tokens")
        if len(self.tokens) != vocab_size:
            raise OctavoError(
                f"{file.path}: {counted(len(self.tokens), 'token')} for an embedding of {counted(vocab_size, 'row')}."
            )
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self._ids[token] != index)
            raise OctavoError(
                f"{file.path}: the vocabulary holds the token {quoted(twice)} twice, which tokenizer.json cannot."
            )
        self.types = self._numbers("tokenizer.ggml.token_type", "iu", np.full(vocab_size, _NORMAL, np.int32))
        self.eos = self._token_id("eos")
        self.bos = self._token_id("bos")
        self.pad = self._token_id("padding")
        self.unknown = self._token_id("unknown")
        self.stop_ids = self._stop_ids()
        self.add_bos = (
            metadata_value(file, "tokenizer.ggml.add_bos_token", bool, self.model == "llama") and self.bos is not None
        )

    def tokenizer_json(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        parts = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, **description} for index, description in self._added_tokens().items()],
            **parts,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json, chat template included."""
        config: dict[str, Any] = {
            "tokenizer_class": "GPT2Tokenizer" if self.model == "gpt2" else "LlamaTokenizer",
            "add_prefix_space": self._adds_prefix_space(),
            "add_bos_token": self.add_bos,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(index): description for index, description in self._added_tokens().items()},
        }
        names = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad, "unk_token": self.unknown}
        config |= {name: self.tokens[index] for name, index in names.items() if index is not None}
        template = metadata_value(self._file, "tokenizer.chat_template", str, "")
        if template:
            config["chat_template"] = template
        return config

    # --- kinds of vocabulary ---

    def _byte_level(self) -> dict[str, Any]:
        pre = metadata_value(self._file, "tokenizer.ggml.pre", str, "gpt-2")
        if pre not in PRE_TOKENIZERS:
            raise OctavoError(
                f"{self._file.path}: pre-tokenizer {quoted(pre)} is not supported; "
                f"supported are {', '.join(PRE_TOKENIZERS)}."
            )
        merges = self._strings("tokenizer.ggml.merges")
        for index, merge in enumerate(merges):
            left, _, right = merge.partition(" ")
            if left not in self._ids or right not in self._ids or left + right not in self._ids:
                raise OctavoError(
                    f"{self._file.path}: merge {index} ({quoted(merge)}) does not join two tokens into a third."
                )
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
            "post_processor": self._post_processor(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": self._bpe(merges, unknown=None, byte_fallback=False),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        prefixes = [{"type": "Prepend", "prepend": _SPACE}] if self._adds_prefix_space() else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self._adds_prefix_space() else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        unknown = None if self.unknown is None else self.tokens[self.unknown]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefixes, replace]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(),
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": self._bpe(self._merges_by_score(), unknown, byte_fallback=bool((self.types == _BYTE).any())),
        }

    def _merges_by_score(self) -> list[str]:
        """SentencePiece merges the pair whose result scores highest: here, every split of every token, best first."""
        scores = self._numbers("tokenizer.ggml.scores", "iuf")
        ranked = []
        for index in np.flatnonzero((self.types == _NORMAL) | (self.types == _USER_DEFINED)).tolist():
            token = self.tokens[index]
            for cut in range(1, min(len(token), 256)):
                left, right = self._ids.get(token[:cut]), self._ids.get(token[cut:])
                if left is not None and right is not None:
                    ranked.append((-float(scores[index]), left, right))
        ranked.sort()
        return [f"{self.tokens[left]} {self.tokens[right]}" for _, left, right in ranked]

    # --- pieces ---

    def _bpe(self, merges: list[str], unknown: str | None, byte_fallback: bool) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback,
            "vocab": self._ids,
            "merges": merges,
        }

    def _post_processor(self) -> dict[str, Any] | None:
        if not self.add_bos:
            return None
        bos = self.tokens[self.bos]
        first = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        return {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [self.bos], "tokens": [bos]}},
        }

    def _added_tokens(self) -> dict[int, dict[str, Any]]:
        added = {}
        for index in np.flatnonzero(np.isin(self.types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist():
            added[index] = {
                "content": self.tokens[index],
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": bool(self.types[index] != _USER_DEFINED),
            }
        return added

    def _adds_prefix_space(self) -> bool:
        return metadata_value(self._file, "tokenizer.ggml.add_space_prefix", bool, self.model == "llama")

    def _stop_ids(self) -> list[int]:
        """Tokens that end a turn: eos, and the end-of-turn tokens that chat models use beside it."""
        if self.eos is None:
            raise OctavoError(f"{self._file.path} names no end token (tokenizer.ggml.eos_token_id).")
        stops = [self.eos]
        for kind in ("eot", "eom"):
            index = self._token_id(kind)
            if index is not None and index not in stops:
                stops.append(index)
        for name in ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|return|>", "<|call|>"):
            index = self._ids.get(name)
            if index is not None and self.types[index] == _CONTROL and index not in stops:
                stops.append(index)
        return stops

    def _token_id(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        if key not in self._file.metadata:
            return None
        index = metadata_value(self._file, key, int)
        if not 0 <= index < len(self.tokens):
            raise OctavoError(f"{self._file.path}: {key} is {index}, outside the vocabulary of {len(self.tokens):,}.")
        return index

    def _strings(self, key: str) -> list[str]:
        value = metadata_value(self._file, key, list)
        if not all(isinstance(item, str) for item in value[:1]):
            raise OctavoError(f"{self._file.path}: metadata {quoted(key)} must be a list of strings.")
        return value

    def _numbers(self, key: str, kinds: str, default: np.ndarray | None = None) -> np.ndarray:
        """One finite number a token. kinds: the legal numpy kinds, of i, u and f."""
        value = metadata_value(self._file, key, np.ndarray, default)
        if value.dtype.kind not in kinds:
            wanted = "numbers" if "f" in kinds else "integers"
            raise OctavoError(f"{self._file.path}: {key} must hold {wanted}, it holds {value.dtype}.")
        require_finite(value, f"{self._file.path}: {key}")
        if len(value) != len(self.tokens):
            raise OctavoError(
                f"{self._file.path}: {key} has {counted(len(value), 'item')} for {counted(len(self.tokens), 'token')}."
            )
        return value
