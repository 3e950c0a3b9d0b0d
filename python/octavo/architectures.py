"""The architectures that octavo converts, as GGUF files describe them: sizes, tensor names, what sets each apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import OctavoError, quoted
from .gguf_reader import GGUFFile, metadata_value

MAX_CONTEXT_LENGTH = 1 << 20
# The graph holds float32; a smaller number would be 0 there, a larger one infinite.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Keys that change the arithmetic in ways the graph does not have, and the values that change nothing.
_REFUSED_UNLESS = {
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# The same of mixtures: the graph takes the softmax of the chosen experts' logits (3), whose sum is 1 without a norm.
_REFUSED_OF_EXPERTS_UNLESS = {
    "expert_gating_func": (0, 3),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
}


@dataclass(frozen=True)
class Architecture:
    """What an architecture has beside llama's layer: RMSNorm, attention, RMSNorm, gated feed-forward.

    interleaved_rows: the file pairs rows 2i and 2i+1 of a head for rotation; the others pair i and i + rotary_dim/2.
    fused: one matrix holds Q, K and V (attn_qkv), one the gate and the up projection (ffn_up).
    qk_norm: RMSNorm of each head of Q and K before the rotation.
    post_norms: RMSNorm of what attention and feed-forward add to the residual, too.
    embedding_scale: embeddings are multiplied by the root of their width.
    activation: of the gate, "silu", "gelu" (its tanh form), or "swiglu_oai" (clamped, times up + 1).
    softcaps: of the attention's scores and of the logits, where the file does not say.
    window_period: every layer has the window but each `window_period`-th, counted from 1; 0 = all have it.
    window: the window's width where the file does not say; 0 = none, but a file with a window_period must say.
    local_rope: layers with the window rotate with this base, unscaled, where the file does not say; 0 = as the others.
    wide_layers: a model of so many layers divides scores by the root of hidden_size / num_heads; the file does not say.
    sinks: one extra logit a head in the softmax (attn_sinks).
    experts: the feed-forward is a mixture of experts.
    ffn_norm: name of the norm before the feed-forward.
    yarn_truncates: YaRN rounds the bounds of its ramp to whole channels.
    """

    interleaved_rows: bool = False
    fused: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: bool = False
    activation: str = "silu"
    softcaps: tuple[float, float] = (0.0, 0.0)
    window_period: int = 0
    window: int = 0
    local_rope: float = 0.0
    wide_layers: int = -1
    sinks: bool = False
    experts: bool = False
    ffn_norm: str = "ffn_norm"
    yarn_truncates: bool = True


_GEMMA = {"post_norms": True, "embedding_scale": True, "activation": "gelu"}
ARCHITECTURES = {
    "llama": Architecture(interleaved_rows=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "gemma2": Architecture(**_GEMMA, softcaps=(50.0, 30.0), window_period=2, window=4096, wide_layers=46),
    "gemma3": Architecture(**_GEMMA, qk_norm=True, window_period=6, local_rope=10_000.0, wide_layers=62),
    "phi3": Architecture(fused=True),
    "gpt-oss": Architecture(
        activation="swiglu_oai",
        window_period=2,
        sinks=True,
        experts=True,
        ffn_norm="post_attention_norm",
        yarn_truncates=False,
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. H = hidden_size, N = num_heads, G = kv_num_heads, D = head_size."""

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    rotary_dim: int
    rope_base: float
    context_length: int
    vocab_size: int
    norm_epsilon: float
    windows: tuple[int, ...]  # of each layer; -1 = full attention
    attention_scale: float  # 0 = 1/sqrt(D)
    attention_softcap: float
    final_softcap: float
    expert_count: int  # 0 = dense
    experts_used: int
    tied_head: bool

    @property
    def traits(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def query_rows(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_rows(self) -> int:
        return self.kv_num_heads * self.head_size

    @property
    def qkv_rows(self) -> int:
        return self.query_rows + 2 * self.kv_rows

    @property
    def gate_up_rows(self) -> int:
        return self.feed_forward_size * (2 if self.traits.fused else 1)

    def has_local_rope(self, layer: int) -> bool:
        """Whether a layer rotates by the second pair of cos and sin."""
        return self.traits.local_rope > 0 and self.windows[layer] > 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the graph needs, with the shape it must have."""
        hidden, feed, traits = self.hidden_size, self.feed_forward_size, self.traits
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocab_size, hidden),
            "output_norm.weight": (hidden,),
        }
        if not self.tied_head:
            shapes["output.weight"] = (self.vocab_size, hidden)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_output.weight": (hidden, self.query_rows),
            f"{traits.ffn_norm}.weight": (hidden,),
        }
        if traits.fused:
            layer["attn_qkv.weight"] = (self.qkv_rows, hidden)
        else:
            layer["attn_q.weight"] = (self.query_rows, hidden)
            layer |= dict.fromkeys(("attn_k.weight", "attn_v.weight"), (self.kv_rows, hidden))
        if traits.qk_norm:
            layer |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (self.head_size,))
        if traits.post_norms:
            layer |= dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), (hidden,))
        if traits.sinks:
            layer["attn_sinks.weight"] = (self.num_heads,)
        if traits.experts:
            count = self.expert_count
            layer |= {"ffn_gate_inp.weight": (count, hidden), "ffn_gate_inp.bias": (count,)}
            layer |= dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (count, feed, hidden))
            layer |= dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias"), (count, feed))
            layer |= {"ffn_down_exps.weight": (count, hidden, feed), "ffn_down_exps.bias": (count, hidden)}
        else:
            layer |= {"ffn_up.weight": (self.gate_up_rows, hidden), "ffn_down.weight": (hidden, feed)}
            if not traits.fused:
                layer["ffn_gate.weight"] = (feed, hidden)
        for index in range(self.layers):
            shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
        return shapes


# Bias vectors that a model may add: weight tensor -> width as an attribute of ModelConfig.
OPTIONAL_BIASES = {
    "attn_q": "query_rows",
    "attn_k": "kv_rows",
    "attn_v": "kv_rows",
    "attn_qkv": "qkv_rows",
    "attn_output": "hidden_size",
    "ffn_gate": "feed_forward_size",
    "ffn_up": "gate_up_rows",
    "ffn_down": "hidden_size",
}
_OPTIONAL_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "output.weight"}


class _Metadata:
    """The keys of one file's architecture, named without its prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture + "."

    def name(self, key: str) -> str:
        return self.prefix + key

    def get(self, key: str, kind: Callable[..., Any], default: Any = None) -> Any:
        return metadata_value(self.file, self.name(key), kind, default)

    def has(self, key: str) -> bool:
        return self.name(key) in self.file.metadata

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not 1 <= value <= 1 << 20:
            raise OctavoError(f"{self.file.path}: {self.name(key)} is {value:,}, which no model of this kind has.")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, float, default))
        if not _SMALLEST <= value <= _LARGEST:  # NaN is not either
            raise OctavoError(
                f"{self.file.path}: {self.name(key)} is {value}; it must be positive and finite as a float32."
            )
        return value

    def softcap(self, key: str, default: float) -> float:
        """0 = none, in the file too."""
        given = self.get(key, float, default)
        return 0.0 if given == 0 else self.positive(key, default)


def read_config(file: GGUFFile, context_length: int | None = None) -> ModelConfig:
    """The model's configuration, with every tensor's presence and shape checked.

    Args:
        file: an open GGUF file.
        context_length: the longest context to export; None = what the file says.

    Raises OctavoError for another architecture, an unsupported variant, implausible sizes, and missing or
    misshapen tensors.
    """
    data = _Metadata(file, _architecture(file))
    traits = ARCHITECTURES[data.prefix[:-1]]
    _refuse(data, _variants(data, traits))
    hidden, layers = data.size("embedding_length"), data.size("block_count")
    num_heads = data.size("attention.head_count")
    kv_num_heads = data.size("attention.head_count_kv", num_heads)
    if num_heads % kv_num_heads:
        raise OctavoError(f"{file.path}: {num_heads} query heads are not a multiple of {kv_num_heads} KV heads.")
    head_size = data.size("attention.key_length", max(hidden // num_heads, 1))
    value_size = data.size("attention.value_length", head_size)
    rotary_dim = data.size("rope.dimension_count", head_size)
    if head_size != value_size or head_size % 8 or head_size > 512:
        raise OctavoError(
            f"{file.path}: keys of {head_size} and values of {value_size} channels a head are not supported; "
            "PagedAttention needs equal sizes, a multiple of 8, at most 512."
        )
    if rotary_dim > head_size or rotary_dim % 2:
        raise OctavoError(
            f"{file.path}: {data.name('rope.dimension_count')} is {rotary_dim}; "
            f"it must be even and at most {head_size}."
        )
    rope_base = data.positive("rope.freq_base", 10_000.0)
    # Layers with a window may have sizes of their own, in newer files.
    own: dict[str, tuple[Any, ...]] = {
        "rope.dimension_count_swa": (rotary_dim,),
        "attention.key_length_swa": (head_size,),
        "attention.value_length_swa": (head_size,),
    }
    if not traits.local_rope:
        own["rope.freq_base_swa"] = (rope_base,)
    _refuse(data, own)
    # Layers first: a lie in block_count must not build a table of a million names.
    file.tensor(f"blk.{layers - 1}.attn_norm.weight")
    experts = data.size("expert_count") if traits.experts else 0
    config = ModelConfig(
        architecture=data.prefix[:-1],
        layers=layers,
        hidden_size=hidden,
        feed_forward_size=data.size("expert_feed_forward_length" if traits.experts else "feed_forward_length"),
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        rotary_dim=rotary_dim,
        rope_base=rope_base,
        context_length=_context_length(data, context_length),
        vocab_size=file.tensor("token_embd.weight").shape[0],
        norm_epsilon=data.positive("attention.layer_norm_rms_epsilon"),
        windows=_windows(data, traits, layers),
        attention_scale=1 / math.sqrt(hidden / num_heads) if layers == traits.wide_layers else 0.0,
        attention_softcap=data.softcap("attn_logit_softcapping", traits.softcaps[0]),
        final_softcap=data.softcap("final_logit_softcapping", traits.softcaps[1]),
        expert_count=experts,
        experts_used=data.size("expert_used_count") if traits.experts else 0,
        tied_head="output.weight" not in file.tensors,
    )
    if config.experts_used > experts:
        raise OctavoError(f"{file.path}: {config.experts_used} experts of {experts} are to be used at once.")
    _check_tensors(file, config)
    return config


def rope_caches(file: GGUFFile, config: ModelConfig, local: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each float32 (context_length, rotary_dim/2), for rotary_interleaved = 0.

    local: of the layers with has_local_rope().
    """
    data = _Metadata(file, config.architecture)
    channels = np.arange(config.rotary_dim // 2, dtype=np.float64) * 2.0 / config.rotary_dim
    if local:
        frequencies, magnitude = data.positive("rope.freq_base_swa", config.traits.local_rope) ** -channels, 1.0
    else:
        frequencies, magnitude = _scaled_frequencies(data, config, config.rope_base**-channels)
    angles = np.arange(config.context_length, dtype=np.float64)[:, None] * frequencies[None, :]
    return (magnitude * np.cos(angles)).astype(np.float32), (magnitude * np.sin(angles)).astype(np.float32)


def half_rotation_order(heads: int, head_size: int, rotary_dim: int) -> np.ndarray:
    """Row order that undoes the permutation of q and k in files with interleaved rows.

    GGUF stores the rows of each head so that rotation pairs channels (2i, 2i+1). PagedAttention with
    rotary_interleaved = 0 pairs (i, i + rotary_dim/2): even rows come first, then odd rows, then the unrotated ones.

    Returns int64 (heads * head_size): new row r is old row order[r].
    """
    within = np.concatenate(
        [np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_size)]
    )
    return (np.arange(heads)[:, None] * head_size + within[None, :]).reshape(-1)


def _architecture(file: GGUFFile) -> str:
    architecture = metadata_value(file, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise OctavoError(
            f"{file.path} holds a model of architecture {quoted(architecture)}; "
            f"octavo convert supports {', '.join(ARCHITECTURES)}."
        )
    return architecture


def _variants(data: _Metadata, traits: Architecture) -> dict[str, tuple[Any, ...]]:
    """Keys that the graph of this architecture does not have -> the values that change nothing."""
    refused: dict[str, tuple[Any, ...]] = dict(_REFUSED_UNLESS)
    refused |= _REFUSED_OF_EXPERTS_UNLESS if traits.experts else {"expert_count": (0,)}
    if not traits.window_period:
        refused["attention.sliding_window_pattern"] = (0,)  # 0: every layer has the window
    if not _has_long_factors(data):
        refused["rope.scaling.attn_factor"] = (1.0,)
    return refused


def _refuse(data: _Metadata, unless: dict[str, tuple[Any, ...]]) -> None:
    for key, harmless in unless.items():
        value = data.get(key, type(harmless[0]), harmless[0])
        if value not in harmless:
            raise OctavoError(
                f"{data.file.path}: {data.name(key)} = {quoted(value)} is not supported by octavo convert."
            )


def _windows(data: _Metadata, traits: Architecture, layers: int) -> tuple[int, ...]:
    # Without a width, an architecture whose layers alternate would silently become one of full attention.
    default = None if traits.window_period and not traits.window else traits.window
    window = data.get("attention.sliding_window", int, default)
    if not 0 <= window <= MAX_CONTEXT_LENGTH:
        raise OctavoError(
            f"{data.file.path}: {data.name('attention.sliding_window')} is {window:,}; "
            f"it must be 0 (none) to {MAX_CONTEXT_LENGTH:,}."
        )
    period = traits.window_period
    if period and data.has("attention.sliding_window_pattern"):
        period = data.size("attention.sliding_window_pattern")
    full = [window == 0 or (period > 0 and (layer + 1) % period == 0) for layer in range(layers)]
    return tuple(-1 if is_full else window for is_full in full)


def _context_length(data: _Metadata, requested: int | None) -> int:
    own = data.get("context_length", int, requested)
    if requested is None:
        if not 1 <= own <= MAX_CONTEXT_LENGTH:
            raise OctavoError(f"{data.file.path}: {data.name('context_length')} is {own:,}; give --context-length.")
        return own
    if requested == 1:
        raise OctavoError("--context-length 1 leaves no room for an answer; give 2 or more.")
    if not 1 <= requested <= own:
        raise OctavoError(f"--context-length {requested:,} is not between 2 and the model's own {own:,}.")
    return requested


def _scaled_frequencies(data: _Metadata, config: ModelConfig, plain: np.ndarray) -> tuple[np.ndarray, float]:
    """Frequencies and the factor of cos and sin, from plain frequencies and what the file says of scaling."""
    if _has_long_factors(data):  # LongRoPE: the exported context chooses
        own = data.size("rope.scaling.original_context_length", config.context_length)
        name = f"rope_factors_{'long' if config.context_length > own else 'short'}.weight"
        return plain / _divisors(data.file, name, plain.size), data.positive("rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in data.file.tensors:  # Llama 3's
        plain = plain / _divisors(data.file, "rope_freqs.weight", plain.size)
    factor, kind = _scaling_factor(data), data.get("rope.scaling.type", str, "linear")
    if kind == "yarn":
        return _yarn(data, config, plain, factor)
    return plain / factor, 1.0


def _divisors(file: GGUFFile, name: str, count: int) -> np.ndarray:
    divisors = file.dequantised(name).astype(np.float64).reshape(-1)
    if divisors.shape != (count,) or (divisors <= 0).any():
        raise OctavoError(f"{file.path}: {name} must hold {count} positive values.")
    return divisors


def _has_long_factors(data: _Metadata) -> bool:
    return "rope_factors_long.weight" in data.file.tensors


def _check_scaling(data: _Metadata) -> None:
    scaling = data.get("rope.scaling.type", str, "linear")
    if scaling == "longrope" and not _has_long_factors(data):
        raise OctavoError(f"{data.file.path}: RoPE scaling 'longrope' needs the tensor 'rope_factors_long.weight'.")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise OctavoError(
            f"{data.file.path}: RoPE scaling {quoted(scaling)} is not supported; supported are none, linear, yarn, "
            "longrope and the tensors rope_freqs and rope_factors."
        )
    _scaling_factor(data)


def _scaling_factor(data: _Metadata) -> float:
    """llama.cpp's rules: no type means linear, an older key may name the factor, and a factor of 0 means 1."""
    scaling = data.get("rope.scaling.type", str, "linear")
    key = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if data.has(key)), None)
    if scaling == "none" or key is None or data.get(key, float) == 0:
        return 1.0
    return data.positive(key)


def _yarn(data: _Metadata, config: ModelConfig, plain: np.ndarray, factor: float) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): quick channels keep their frequency, slow ones are divided by `factor`."""
    original = data.size("rope.scaling.original_context_length", config.context_length)
    if config.rope_base <= 1:
        raise OctavoError(f"{data.file.path}: YaRN needs a {data.name('rope.freq_base')} above 1.")

    def channel(rotations: float) -> float:
        """The channel that turns so many times within the original context."""
        turned = math.log(original / (rotations * 2 * math.pi))
        return config.rotary_dim * turned / (2 * math.log(config.rope_base))

    low = channel(data.positive("rope.scaling.yarn_beta_fast", 32.0))
    high = channel(data.positive("rope.scaling.yarn_beta_slow", 1.0))
    if config.traits.yarn_truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    slow = np.clip((np.arange(plain.size) - low) / max(high - low, 0.001), 0, 1)
    return plain / factor * slow + plain * (1 - slow), 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    _check_scaling(_Metadata(file, config.architecture))
    expected = config.tensor_shapes()
    for layer in range(config.layers):
        for name, width in OPTIONAL_BIASES.items():
            weight, bias = f"blk.{layer}.{name}.weight", f"blk.{layer}.{name}.bias"
            if weight in expected and bias in file.tensors:
                expected[bias] = (getattr(config, width),)
    for name, shape in expected.items():
        got = file.tensor(name).shape
        if got != shape:
            raise OctavoError(f"{file.path}: tensor {quoted(name)} has shape {got}, its metadata imply {shape}.")
    unknown = sorted(set(file.tensors) - set(expected) - _OPTIONAL_TENSORS)
    if unknown:
        raise OctavoError(
            f"{file.path} has tensors that a {config.architecture} model does not have "
            f"({', '.join(map(quoted, unknown[:3]))}); "
            "leaving them out would change its answers, so it is not converted."
        )
