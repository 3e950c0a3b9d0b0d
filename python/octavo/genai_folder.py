"""Making the folder that onnxruntime-genai loads a model from: its configuration, and all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import OctavoError
from .graph import GraphOptions
from .llama import LlamaConfig
from .model_folder import CONFIG_FILE
from .runtime import LIBRARY_NAME
from .tokenizer import Vocabulary

CACHE_BYTES = 512 << 20  # default size of the key-value cache
_CACHE_ELEMENT_BYTES = {"float32": 4, "float16": 2}


def default_num_blocks(config: LlamaConfig, options: GraphOptions) -> int:
    """Blocks for four full contexts, or as many as fit CACHE_BYTES, but always enough for one block."""
    token_bytes = 2 * config.layers * config.kv_rows * _CACHE_ELEMENT_BYTES[options.cache_type]
    affordable = CACHE_BYTES // (token_bytes * options.block_size)
    useful = 4 * -(-config.context_length // options.block_size)
    return max(1, min(affordable, useful))


def genai_config(config: LlamaConfig, options: GraphOptions, vocabulary: Vocabulary, num_blocks: int) -> dict[str, Any]:
    """The content of genai_config.json.

    block_size must equal the graph's static dimension, and num_blocks must be there: onnxruntime-genai's defaults for
    both fail on a CPU.
    """
    stops = vocabulary.stop_ids
    model: dict[str, Any] = {
        "type": "llama",
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "decoder": {
            "session_options": {"log_id": "octavo", "custom_ops_library": LIBRARY_NAME},
            "filename": "model.onnx",
            "head_size": config.head_size,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_num_heads,
            "num_hidden_layers": config.layers,
            "inputs": {},
            "outputs": {},
        },
    }
    pad = vocabulary.pad if vocabulary.pad is not None else stops[0]
    model |= {"pad_token_id": pad} | ({} if vocabulary.bos is None else {"bos_token_id": vocabulary.bos})
    return {
        "model": model,
        "search": {},
        "engine": {"dynamic_batching": {"block_size": options.block_size, "num_blocks": num_blocks}},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: Path, force: bool) -> Iterator[Path]:
    """Gives a temporary folder beside `target` that takes its place when the block ends well, and vanishes otherwise.

    Errors: OctavoError where `target` is in use (an existing model is replaced with `force` only, and a folder that is
    not a model never) or cannot be written.
    """
    target = target.absolute()
    _check_target(target, force)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise OctavoError(f"{target} cannot be written: {error.strerror or error}.") from error
    try:
        yield partial
        _replace(target, partial)
    except OSError as error:
        raise OctavoError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_space(folder: Path, byte_count: int) -> None:
    """Refuses before hours of writing what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if free < byte_count:
        raise OctavoError(
            f"{folder.parent} has {free >> 20:,} MiB left; the model needs about {byte_count >> 20:,} MiB."
        )


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise OctavoError(f"{target} is a file; give a folder that does not exist yet.")
    try:
        content = os.listdir(target)
    except OSError as error:
        raise OctavoError(f"{target} cannot be read: {error.strerror or error}.") from error
    if not content:
        return
    if CONFIG_FILE not in content:
        raise OctavoError(f"{target} holds other files and is no model folder; give a folder that does not exist yet.")
    if not force:
        raise OctavoError(f"{target} already holds a model; add --force to replace it, or give another folder.")


def _replace(target: Path, partial: Path) -> None:
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
