"""Whether a model's keys and values fit a float16 cache.

What W_k and W_v multiply comes out of RMSNorm, and so has a length that no text exceeds: the weights alone bound K and
V. On SmolLM2-135M-Instruct the bound takes 0.06 s of a conversion of 0.9 s, where a run over the calibration text takes
6 s; it is 166, four to nine times the largest key of that run. Only a model that the bound does not clear is run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import weights
from .architectures import ModelConfig, rope_caches
from .calibration import float32_caches
from .errors import OctavoError
from .gguf_reader import GGUFFile
from .kv_cache import CACHE_TYPES
from .paged_session import load_graph
from .progress import Progress

FLOAT16_LARGEST = 65_504
# Half: 4-bit weights and 8-bit activations exceed the bound of exact arithmetic a little, and other texts have larger
# keys than the calibration's.
LIMIT = FLOAT16_LARGEST / 2


def holds_float16(cache_type: str) -> bool:
    """cache_type: a key of CACHE_TYPES. bfloat16 reaches as far as float32, and codes as far as their scales."""
    return any(side.name == "float16" for side in CACHE_TYPES[cache_type])


def fits_for_any_text(file: GGUFFile, config: ModelConfig) -> bool:
    """Whether the weights alone keep |K| and |V| within LIMIT. Where they do not, the model may still."""
    return all(max(pair) <= LIMIT for pair in bounds(file, config))


def bounds(file: GGUFFile, config: ModelConfig) -> list[tuple[float, float]]:
    """Per layer, what no |K| (as stored, rotated) and no |V| of any text exceeds.

    RMSNorm gives u * g, where u has at most the root of its width H for a length. Of that, by Cauchy and Schwarz, a row
    w of a projection makes at most sqrt(H) * |w * g|, plus its |bias|; QK-norm, likewise, sqrt(D) * |g|. RoPE mixes two
    channels, to at most sqrt(2) times the larger, times what YaRN and LongRoPE multiply cos and sin by.
    """
    growth: dict[bool, float] = {}  # of the layers that rotate by the second pair of cos and sin, and of the others
    found = []
    for layer in range(config.layers):
        prefix, local = f"blk.{layer}.", config.has_local_rope(layer)
        if local not in growth:
            cos, _ = rope_caches(file, config, local)
            growth[local] = max(1.0, np.sqrt(2) * float(cos[0].max()))  # position 0 is not turned
        norm = weights.vector(file, prefix + "attn_norm.weight")
        if config.traits.fused:
            key, value = np.split(_largest_products(file, prefix + "attn_qkv", norm)[config.query_rows :], 2)
        else:
            key, value = (_largest_products(file, prefix + name, norm) for name in ("attn_k", "attn_v"))
        if config.traits.qk_norm:
            key = np.sqrt(config.head_size) * np.abs(weights.vector(file, prefix + "attn_k_norm.weight"))
        found.append((growth[local] * float(key.max()), float(value.max())))
    return found


def require_float16(model_dir: Path, progress: Progress) -> None:
    """Runs a model of octavo convert over the calibration text. Raises OctavoError where |K| or |V| exceeds LIMIT."""
    caches = float32_caches(load_graph(model_dir / "model.onnx"), model_dir, progress=progress)
    largest, layer, name = max(
        (float(np.abs(values).max()), layer, name)
        for layer, pair in enumerate(caches)
        for name, values in zip(("keys", "values"), pair, strict=True)
    )
    if largest > LIMIT:
        raise OctavoError(
            f"layer {layer} computes {name} of up to {largest:,.0f}; a float16 cache holds at most {FLOAT16_LARGEST:,},"
            " half of which is kept free for other texts. Add --kv-cache bfloat16, or float32."
        )


def _largest_products(file: GGUFFile, name: str, norm: np.ndarray) -> np.ndarray:
    """The bound of each row of a projection, float64; norm: the weight of the RMSNorm before it."""
    squares = np.square(file.dequantised(name + ".weight"), dtype=np.float64)
    bound = np.sqrt(norm.size * (squares @ np.square(norm, dtype=np.float64)))
    bias = name + ".bias"
    return bound + np.abs(weights.vector(file, bias)) if bias in file.tensors else bound
