"""Tiny random models of every architecture, as transformers names them and as llama.cpp's GGUF files hold them.

transformers' own logits, KEPT_ROWS of TOKENS, are in data/architecture_logits.npz (make_architecture_logits.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models_support import add_byte_vocabulary, quantised

LOGITS = Path(__file__).parent / "data/architecture_logits.npz"
VOCAB, HIDDEN, FEED, HEADS, KV_HEADS, CONTEXT, TOKENS = 272, 64, 96, 4, 2, 128, 40
KEPT_ROWS = [0, 5, 8, 9, 17, 31, 32, 39]  # of the logits: before, at and beyond the window and the original contexts
EXPERTS, EXPERTS_USED, WINDOW, EPSILON = 4, 2, 9, 1e-6


@dataclass(frozen=True)
class Case:
    """One model.

    architecture: general.architecture. config: of transformers' configuration beside COMMON.
    keys: metadata beside the common ones, as name -> (method of GGUFWriter, value). tensors: further tensors.
    """

    architecture: str
    model_type: str
    layers: int = 2
    tied: bool = False
    head_size: int = 32
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, Any]] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def transformers_config(self) -> dict[str, Any]:
        common = {
            "model_type": self.model_type,
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": self.head_size,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": EPSILON,
            "tie_word_embeddings": self.tied,
            "pad_token_id": 0,
            "eos_token_id": 256,
            "bos_token_id": 257,
        }
        return common | self.config


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_BASE = {"rope.freq_base": ("add_float32", 500.0)}
_WINDOW = {"attention.sliding_window": ("add_uint32", WINDOW)}
_SHORT, _LONG = (np.linspace(1, most, 8).astype(np.float32) for most in (1.5, 6))
_ORIGINAL = 32
_YARN = {"factor": 4.0, "original_max_position_embeddings": _ORIGINAL, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN_KEYS = {
    "rope.scaling.type": ("add_string", "yarn"),
    "rope.scaling.factor": ("add_float32", 4.0),
    "rope.scaling.original_context_length": ("add_uint32", _ORIGINAL),
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": _SHORT.tolist(),
    "long_factor": _LONG.tolist(),
    "original_max_position_embeddings": _ORIGINAL,
}
_LONGROPE_FACTOR = float(np.sqrt(1 + np.log(CONTEXT / _ORIGINAL) / np.log(_ORIGINAL)))
_GEMMA3_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]

CASES = {
    "llama": Case("llama", "llama", config=_rope(500.0), keys=_BASE),
    "qwen2": Case("qwen2", "qwen2", head_size=16, tied=True, config=_rope(500.0), keys=_BASE),
    "qwen2, YaRN": Case(
        "qwen2", "qwen2", head_size=16, config=_rope(500.0, **_YARN, rope_type="yarn"), keys=_BASE | _YARN_KEYS
    ),
    "qwen3": Case("qwen3", "qwen3", tied=True, config=_rope(500.0), keys=_BASE),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        tied=True,
        config=_rope(500.0)
        | {
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        keys=_BASE
        | _WINDOW
        | {
            "attn_logit_softcapping": ("add_float32", 2.0),
            "final_logit_softcapping": ("add_float32", 3.0),
        },
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        layers=6,
        tied=True,
        config={
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": _GEMMA3_LAYERS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
            },
            "hidden_activation": "gelu_pytorch_tanh",
        },
        keys=_BASE
        | _WINDOW
        | {"rope.scaling.type": ("add_string", "linear"), "rope.scaling.factor": ("add_float32", 8.0)},
    ),
    "phi3": Case(
        "phi3",
        "phi3",
        head_size=16,
        config=_rope(500.0, partial_rotary_factor=0.5) | {"sliding_window": WINDOW},
        keys=_BASE | _WINDOW | {"rope.dimension_count": ("add_uint32", 8)},
    ),
    "phi3, LongRoPE": Case(
        "phi3",
        "phi3",
        head_size=16,
        config=_rope(500.0, **_LONGROPE) | {"original_max_position_embeddings": _ORIGINAL},
        keys=_BASE
        | {
            "rope.scaling.original_context_length": ("add_uint32", _ORIGINAL),
            "rope.scaling.attn_factor": ("add_float32", _LONGROPE_FACTOR),
        },
        tensors={"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
    ),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        config=_rope(500.0, **_YARN, rope_type="yarn", truncate=False)
        | {
            "sliding_window": WINDOW,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_USED,
        },
        keys=_BASE
        | _WINDOW
        | _YARN_KEYS
        | {
            "expert_count": ("add_uint32", EXPERTS),
            "expert_used_count": ("add_uint32", EXPERTS_USED),
            "expert_feed_forward_length": ("add_uint32", FEED),
        },
    ),
}


def token_ids() -> np.ndarray:
    """The text: int64 (TOKENS)."""
    return np.random.RandomState(11).randint(0, VOCAB, TOKENS)


def transformers_weights(case: Case) -> dict[str, np.ndarray]:
    """Every parameter under transformers' name, float32; the same numbers with every version of numpy."""
    rng = np.random.RandomState(5)
    kind, query_rows, kv_rows = case.model_type, HEADS * case.head_size, KV_HEADS * case.head_size
    found: dict[str, np.ndarray] = {}

    def matrix(name: str, *shape: int, scale: float = 0.15) -> None:
        found[name] = (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(name: str, width: int) -> None:
        centre = 0.0 if kind.startswith("gemma") else 1.0
        found[name] = (rng.standard_normal(width) * 0.2 + centre).astype(np.float32)

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        matrix(name + ".weight", rows, columns)
        if bias:
            matrix(name + ".bias", rows, scale=0.3)

    matrix("model.embed_tokens.weight", VOCAB, HIDDEN, scale=0.3 if kind.startswith("gemma") else 1.0)
    for layer in range(case.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norm(prefix + "input_layernorm.weight", HIDDEN)
        norm(prefix + "post_attention_layernorm.weight", HIDDEN)
        if kind.startswith("gemma"):
            norm(prefix + "pre_feedforward_layernorm.weight", HIDDEN)
            norm(prefix + "post_feedforward_layernorm.weight", HIDDEN)
        if kind == "phi3":
            linear(attention + "qkv_proj", query_rows + 2 * kv_rows, HIDDEN)
        else:
            for name, rows in (("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
                linear(attention + name, rows, HIDDEN, bias=kind in ("qwen2", "gpt_oss"))
        linear(attention + "o_proj", HIDDEN, query_rows, bias=kind == "gpt_oss")
        if kind in ("qwen3", "gemma3_text"):
            norm(attention + "q_norm.weight", case.head_size)
            norm(attention + "k_norm.weight", case.head_size)
        if kind == "gpt_oss":
            matrix(attention + "sinks", HEADS, scale=1.0)
            linear(mlp + "router", EXPERTS, HIDDEN, bias=True)
            matrix(mlp + "experts.gate_up_proj", EXPERTS, HIDDEN, 2 * FEED, scale=0.4)
            matrix(mlp + "experts.gate_up_proj_bias", EXPERTS, 2 * FEED, scale=1.0)
            matrix(mlp + "experts.down_proj", EXPERTS, FEED, HIDDEN)
            matrix(mlp + "experts.down_proj_bias", EXPERTS, HIDDEN)
            continue
        if kind == "phi3":
            linear(mlp + "gate_up_proj", 2 * FEED, HIDDEN)
        else:
            linear(mlp + "gate_proj", FEED, HIDDEN)
            linear(mlp + "up_proj", FEED, HIDDEN)
        linear(mlp + "down_proj", HIDDEN, FEED)
    norm("model.norm.weight", HIDDEN)
    if not case.tied:
        linear("lm_head", VOCAB, HIDDEN)
    return found


def gguf_tensors(case: Case) -> dict[str, np.ndarray]:
    """The model's tensors as llama.cpp's convert_hf_to_gguf.py stores them, by the gguf package's table of names."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, case.layers)
    found = dict(case.tensors)
    for source, values in transformers_weights(case).items():
        if ".experts." in source:
            found |= _expert_tensors(source, values)
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert name, source
        if source.endswith("norm.weight") and case.architecture.startswith("gemma"):
            values = values + np.float32(1)
        if case.architecture == "llama" and source.endswith(("q_proj.weight", "k_proj.weight")):
            heads = values.shape[0] // case.head_size  # rotation pairs neighbouring rows
            values = values.reshape(heads, 2, case.head_size // 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        found[name if name.endswith((".weight", ".bias")) else name + ".weight"] = values
    return found


def _expert_tensors(source: str, values: np.ndarray) -> dict[str, np.ndarray]:
    prefix = f"blk.{source.split('.')[2]}."
    suffix = "bias" if source.endswith("bias") else "weight"
    if suffix == "weight":
        values = values.swapaxes(1, 2)
    if "gate_up" not in source:
        return {f"{prefix}ffn_down_exps.{suffix}": values}
    return {f"{prefix}ffn_gate_exps.{suffix}": values[:, 0::2], f"{prefix}ffn_up_exps.{suffix}": values[:, 1::2]}


def write_gguf(
    path: Path,
    case: Case,
    kind: str = "F32",
    without: tuple[str, ...] = (),
    more: dict[str, tuple[str, Any]] | None = None,
) -> None:
    """The model as a GGUF file. kind: of the matrices. without: keys to leave out. more: keys to add or replace."""
    writer = gguf.GGUFWriter(path, case.architecture)
    keys: dict[str, tuple[str, Any]] = {
        "block_count": ("add_uint32", case.layers),
        "context_length": ("add_uint32", CONTEXT),
        "embedding_length": ("add_uint32", HIDDEN),
        "feed_forward_length": ("add_uint32", FEED),
        "attention.head_count": ("add_uint32", HEADS),
        "attention.head_count_kv": ("add_uint32", KV_HEADS),
        "attention.key_length": ("add_uint32", case.head_size),
        "attention.value_length": ("add_uint32", case.head_size),
        "attention.layer_norm_rms_epsilon": ("add_float32", EPSILON),
        "rope.dimension_count": ("add_uint32", case.head_size),
    }
    for key, (method, value) in (keys | case.keys | (more or {})).items():
        if key not in without:
            getattr(writer, method)(f"{case.architecture}.{key}", value)
    add_byte_vocabulary(writer, VOCAB)
    for name, values in gguf_tensors(case).items():
        tensor_kind = gguf.GGMLQuantizationType[kind if values.ndim > 1 and name.endswith(".weight") else "F32"]
        data = quantised(np.ascontiguousarray(values), tensor_kind)
        writer.add_tensor(name, data, raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
