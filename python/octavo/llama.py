"""The llama architecture as a GGUF file describes it: sizes, tensor names, and which of its variants are supported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import OctavoError, quoted
from .gguf_reader import GGUFFile, metadata_value

SUPPORTED_ARCHITECTURES = ("llama",)
MAX_CONTEXT_LENGTH = 1 << 20
# The graph holds float32; a smaller number would be 0 there, a larger one infinite.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Keys that change the arithmetic in ways the graph does not have, and the values that change nothing.
_REFUSED_UNLESS = {
    "llama.expert_count": (0,),
    "llama.attention.scale": (0.0,),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.logit_scale": (0.0, 1.0),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.causal": (True,),
    "llama.rope.scaling.attn_factor": (1.0,),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model. H = hidden_size, N = num_heads, G = kv_num_heads, D = head_size."""

    layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    rotary_dim: int
    rope_base: float
    rope_position_scale: float  # linear scaling: positions are multiplied by this before rotation
    context_length: int
    vocab_size: int
    norm_epsilon: float
    local_window_size: int  # -1 = full attention
    tied_head: bool

    @property
    def query_rows(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_rows(self) -> int:
        return self.kv_num_heads * self.head_size

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the graph needs, with the shape it must have."""
        hidden, feed = self.hidden_size, self.feed_forward_size
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocab_size, hidden),
            "output_norm.weight": (hidden,),
        }
        if not self.tied_head:
            shapes["output.weight"] = (self.vocab_size, hidden)
        for layer in range(self.layers):
            prefix = f"blk.{layer}."
            shapes |= {
                prefix + "attn_norm.weight": (hidden,),
                prefix + "attn_q.weight": (self.query_rows, hidden),
                prefix + "attn_k.weight": (self.kv_rows, hidden),
                prefix + "attn_v.weight": (self.kv_rows, hidden),
                prefix + "attn_output.weight": (hidden, self.query_rows),
                prefix + "ffn_norm.weight": (hidden,),
                prefix + "ffn_gate.weight": (feed, hidden),
                prefix + "ffn_up.weight": (feed, hidden),
                prefix + "ffn_down.weight": (hidden, feed),
            }
        return shapes


# Bias vectors that some llama-architecture models add: weight tensor -> width as an attribute of LlamaConfig.
OPTIONAL_BIASES = {
    "attn_q": "query_rows",
    "attn_k": "kv_rows",
    "attn_v": "kv_rows",
    "attn_output": "hidden_size",
    "ffn_gate": "feed_forward_size",
    "ffn_up": "feed_forward_size",
    "ffn_down": "hidden_size",
}
_OPTIONAL_TENSORS = {"rope_freqs.weight", "output.weight"}


def read_config(file: GGUFFile, context_length: int | None = None) -> LlamaConfig:
    """The model's configuration, with every tensor's presence and shape checked.

    Args:
        file: an open GGUF file.
        context_length: the longest context to export; None = what the file says.

    Raises OctavoError for another architecture, an unsupported variant, implausible sizes, and missing or
    misshapen tensors.
    """
    _check_architecture(file)
    hidden = _size(file, "llama.embedding_length")
    num_heads = _size(file, "llama.attention.head_count")
    kv_num_heads = _size(file, "llama.attention.head_count_kv", num_heads)
    if num_heads % kv_num_heads:
        raise OctavoError(f"{file.path}: {num_heads} query heads are not a multiple of {kv_num_heads} KV heads.")
    head_size = _size(file, "llama.attention.key_length", max(hidden // num_heads, 1))
    value_size = _size(file, "llama.attention.value_length", head_size)
    rotary_dim = _size(file, "llama.rope.dimension_count", head_size)
    if head_size != value_size or head_size % 8 or head_size > 512:
        raise OctavoError(
            f"{file.path}: keys of {head_size} and values of {value_size} channels a head are not supported; "
            "PagedAttention needs equal sizes, a multiple of 8, at most 512."
        )
    if rotary_dim > head_size or rotary_dim % 2:
        raise OctavoError(
            f"{file.path}: llama.rope.dimension_count is {rotary_dim}; it must be even and at most {head_size}."
        )

    config = LlamaConfig(
        layers=_size(file, "llama.block_count"),
        hidden_size=hidden,
        feed_forward_size=_size(file, "llama.feed_forward_length"),
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        rotary_dim=rotary_dim,
        rope_base=_positive(file, "llama.rope.freq_base", 10_000.0),
        rope_position_scale=_rope_position_scale(file),
        context_length=_context_length(file, context_length),
        vocab_size=file.tensor("token_embd.weight").shape[0],
        norm_epsilon=_positive(file, "llama.attention.layer_norm_rms_epsilon"),
        local_window_size=_local_window_size(file),
        tied_head="output.weight" not in file.tensors,
    )
    _check_tensors(file, config)
    return config


def rope_caches(file: GGUFFile, config: LlamaConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each float32 (context_length, rotary_dim/2), for rotary_interleaved = 0."""
    half = config.rotary_dim // 2
    frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) * 2.0 / config.rotary_dim)
    if "rope_freqs.weight" in file.tensors:  # Llama 3's scaling, as divisors
        divisors = file.dequantised("rope_freqs.weight").astype(np.float64).reshape(-1)
        if divisors.shape != (half,) or (divisors <= 0).any():
            raise OctavoError(f"{file.path}: rope_freqs.weight must hold {half} positive values.")
        frequencies = frequencies / divisors
    positions = np.arange(config.context_length, dtype=np.float64) * config.rope_position_scale
    angles = positions[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def half_rotation_order(heads: int, head_size: int, rotary_dim: int) -> np.ndarray:
    """Row order that undoes the permutation of GGUF's q and k.

    GGUF stores the rows of each head so that rotation pairs channels (2i, 2i+1). PagedAttention with
    rotary_interleaved = 0 pairs (i, i + rotary_dim/2): even rows come first, then odd rows, then the unrotated ones.

    Returns int64 (heads * head_size): new row r is old row order[r].
    """
    within = np.concatenate(
        [np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_size)]
    )
    return (np.arange(heads)[:, None] * head_size + within[None, :]).reshape(-1)


def _check_architecture(file: GGUFFile) -> None:
    architecture = metadata_value(file, "general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise OctavoError(
            f"{file.path} holds a model of architecture {quoted(architecture)}; "
            f"octavo convert supports {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    for key, harmless in _REFUSED_UNLESS.items():
        value = metadata_value(file, key, type(harmless[0]), harmless[0])
        if value not in harmless:
            raise OctavoError(f"{file.path}: {key} = {quoted(value)} is not supported by octavo convert.")


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = metadata_value(file, key, int, default)
    if not 1 <= value <= 1 << 20:
        raise OctavoError(f"{file.path}: {key} is {value:,}, which no model of this kind has.")
    return value


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = float(metadata_value(file, key, float, default))
    if not _SMALLEST <= value <= _LARGEST:  # NaN is not either
        raise OctavoError(f"{file.path}: {key} is {value}; it must be positive and finite as a float32.")
    return value


def _local_window_size(file: GGUFFile) -> int:
    window = metadata_value(file, "llama.attention.sliding_window", int, 0)
    if not 0 <= window <= MAX_CONTEXT_LENGTH:
        raise OctavoError(
            f"{file.path}: llama.attention.sliding_window is {window:,}; it must be 0 (none) to {MAX_CONTEXT_LENGTH:,}."
        )
    return window or -1


def _context_length(file: GGUFFile, requested: int | None) -> int:
    own = metadata_value(file, "llama.context_length", int, requested)
    if requested is None:
        if not 1 <= own <= MAX_CONTEXT_LENGTH:
            raise OctavoError(f"{file.path}: llama.context_length is {own:,}; give --context-length.")
        return own
    if not 1 <= requested <= own:
        raise OctavoError(f"--context-length {requested:,} is not between 1 and the model's own {own:,}.")
    return requested


def _rope_position_scale(file: GGUFFile) -> float:
    """llama.cpp's rules: no type means linear, an older key may name the factor, and a factor of 0 means 1."""
    scaling = metadata_value(file, "llama.rope.scaling.type", str, "linear")
    if scaling == "none":
        return 1.0
    if scaling == "linear":
        keys = ("llama.rope.scaling.factor", "llama.rope.scale_linear")
        key = next((key for key in keys if key in file.metadata), None)
        if key is None or metadata_value(file, key, float) == 0:
            return 1.0
        return 1.0 / _positive(file, key)
    raise OctavoError(
        f"{file.path}: RoPE scaling {quoted(scaling)} is not supported; supported are none, linear and rope_freqs."
    )


def _check_tensors(file: GGUFFile, config: LlamaConfig) -> None:
    # Layers first: a lie in block_count must not build a table of a million names.
    file.tensor(f"blk.{config.layers - 1}.attn_norm.weight")
    expected = config.tensor_shapes()
    for layer in range(config.layers):
        for name, width in OPTIONAL_BIASES.items():
            bias = f"blk.{layer}.{name}.bias"
            if bias in file.tensors:
                expected[bias] = (getattr(config, width),)
    for name, shape in expected.items():
        got = file.tensor(name).shape
        if got != shape:
            raise OctavoError(f"{file.path}: tensor {quoted(name)} has shape {got}, its metadata imply {shape}.")
    unknown = sorted(set(file.tensors) - set(expected) - _OPTIONAL_TENSORS)
    if unknown:
        raise OctavoError(
            f"{file.path} has tensors that a plain llama model does not have ({', '.join(map(quoted, unknown[:3]))}); "
            "leaving them out would change its answers, so it is not converted."
        )
