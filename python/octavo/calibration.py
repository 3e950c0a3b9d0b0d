"""A short run of a model that finds the scales of a quantised key-value cache."""

from __future__ import annotations

import copy
import os
from importlib import resources
from pathlib import Path

import numpy as np
import onnx

from .errors import OctavoError, first_line
from .kv_cache import cache_type_of, choose_scales, needs_scales, set_cache_type
from .model_folder import config_number, graph_file, read_config
from .paged_session import PagedSession, load_graph
from .progress import Progress, no_progress
from .runtime import genai_config, require_no_nul

CHUNK = 128  # tokens fed at once: bounds the logits, which a run computes for every token
MAX_TOKENS = 1024


def shipped_text(name: str) -> str:
    """A text of the package: "calibration" or "perplexity"; see texts/README.md."""
    return (resources.files("octavo") / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def encode(model_dir: str | os.PathLike[str], text: str) -> np.ndarray:
    """Token ids, int32, with the begin token that the model was trained with. Raises OctavoError where that fails."""
    require_no_nul(text, "the text")
    config = genai_config(model_dir)
    import onnxruntime_genai as og

    try:
        tokenizer = og.Tokenizer(config)
        tokenizer.update_options(add_special_tokens="true")
        return np.asarray(tokenizer.encode(text), np.int32)
    except Exception as error:
        raise OctavoError(f"the text cannot be tokenized: {first_line(error)}") from error


def float32_caches(
    graph: onnx.ModelProto,
    model_dir: str | os.PathLike[str],
    threads: int = 0,
    progress: Progress = no_progress,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of every layer, float32 (tokens, G, D), as a float32 cache holds them after the calibration text.

    graph: of load_graph. The text is cut to the model's context, and to MAX_TOKENS.
    """
    config = read_config(model_dir)
    context = config_number(config, "model", "context_length")
    ids = encode(model_dir, shipped_text("calibration"))[: min(context, MAX_TOKENS)]
    exact = copy.deepcopy(graph)
    set_cache_type(exact, "float32")
    session = PagedSession(exact, graph_file(model_dir, config).parent, len(ids), threads)
    for start in range(0, len(ids), CHUNK):
        progress("calibrating", start, len(ids))
        session.feed(ids[start : start + CHUNK], start)
    progress("calibrating", len(ids), len(ids))
    caches = session.cached(len(ids))
    for layer, pair in enumerate(caches):
        if not all(np.isfinite(values).all() for values in pair):
            raise OctavoError(f"layer {layer} computes NaN or infinite keys or values: its weights are damaged.")
    return caches


def give_cache_type(model_dir: Path, cache_type: str, progress: Progress = no_progress, threads: int = 0) -> None:
    """Rewrites model.onnx of a whole model folder so that its caches have another type, calibrated where need be."""
    path = model_dir / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    if cache_type_of(model) == cache_type and not needs_scales(cache_type):
        return
    scales = []
    if needs_scales(cache_type):
        scales = choose_scales(float32_caches(load_graph(path), model_dir, threads, progress), cache_type)
    set_cache_type(model, cache_type, scales)
    path.write_bytes(model.SerializeToString())
