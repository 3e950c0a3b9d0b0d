"""`octavo convert`: a GGUF file into a folder that onnxruntime-genai runs with PagedAttention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache_range, genai_folder, kv_cache
from .architectures import ModelConfig, read_config
from .calibration import give_cache_type
from .errors import OctavoError, counted
from .gguf_reader import GGUFFile
from .graph import GraphOptions, step_count, write_graph
from .kv_cache import CACHE_TYPES, needs_scales
from .memory import available_bytes, fitting_blocks
from .model_folder import CONFIG_FILE, ORDINARY_PROMPT
from .progress import Progress, no_progress
from .runtime import get_library_path
from .sizes import shown_bytes
from .tokenizer import Vocabulary


@dataclass(frozen=True)
class Converted:
    """What was written: the folder, its size, its configuration and form.

    warnings: sentences on a context or a cache that is hardly meant.
    """

    folder: Path
    byte_count: int
    config: ModelConfig
    options: GraphOptions
    num_blocks: int
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "bytes": self.byte_count,
            "architecture": self.config.architecture,
            "weights": self.options.weight_form,
            "kv_cache": self.options.cache_type,
            "context_length": self.config.context_length,
            "block_size": self.options.block_size,
            "num_blocks": self.num_blocks,
        }


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: GraphOptions | None = None,
    *,
    context_length: int | None = None,
    num_blocks: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Converted:
    """Converts a GGUF file to a genai model folder. `target` is whole afterwards, or untouched.

    Args:
        source: the .gguf file.
        target: the folder to make; with `force` an existing model folder is replaced.
        options: form of weights and cache.
        context_length: longest context; None = the model's own.
        num_blocks: blocks of the key-value cache; None = see genai_folder.default_num_blocks.
        progress: called as (step, steps done, steps in all).

    A cache type with scales is calibrated with a short run of the model, which needs octavo's library. So does float16
    where the weights alone do not show that keys and values fit (cache_range.py).

    Raises OctavoError where the file or the folder is unusable, or keys or values would overflow float16.
    """
    options = options or GraphOptions()
    if options.cache_type not in CACHE_TYPES:
        raise OctavoError(f"no cache holds {options.cache_type}; choose one of {', '.join(CACHE_TYPES)}.")
    if needs_scales(options.cache_type):
        get_library_path()  # its absence must not be found out after the weights are written
    with GGUFFile(source) as file:
        config = read_config(file, context_length)
        vocabulary = Vocabulary(file, config.vocab_size)
        tokenizer_json = vocabulary.tokenizer_json()
        blocks = num_blocks or genai_folder.default_num_blocks(config, options)
        total, done = step_count(config), 0

        def step(name: str) -> None:
            nonlocal done
            done += 1
            progress(name, done, total)

        with genai_folder.new_folder(Path(target), force) as folder:
            genai_folder.require_space(folder, _estimated_bytes(file, options))
            fits = not cache_range.holds_float16(options.cache_type) or cache_range.fits_for_any_text(file, config)
            if not fits:
                get_library_path()
            write_graph(file, config, options, folder, _version(), step)
            genai_folder.write_json(folder / "tokenizer.json", tokenizer_json)
            genai_folder.write_json(folder / "tokenizer_config.json", vocabulary.tokenizer_config())
            content = genai_folder.genai_config(config, options, vocabulary, blocks)
            genai_folder.write_json(folder / CONFIG_FILE, content)
            if not fits:
                cache_range.require_float16(folder, progress)
            give_cache_type(folder, options.cache_type, progress)
            byte_count = sum(entry.stat().st_size for entry in folder.iterdir())
    warnings = tuple(_warnings(config, options, blocks, context_length))
    return Converted(Path(target), byte_count, config, options, blocks, warnings)


def _warnings(config: ModelConfig, options: GraphOptions, blocks: int, context_length: int | None) -> Iterator[str]:
    """What octavo doctor would find, by the options' names. The folder may be for another machine."""
    tokens = blocks * options.block_size
    if context_length is not None and context_length < ORDINARY_PROMPT:
        yield f"a context of {counted(context_length, 'token')} is too short for an ordinary prompt (--context-length)."
    if tokens < ORDINARY_PROMPT:
        yield f"a cache of {counted(tokens, 'token')} is too small for an ordinary prompt (--num-blocks)."
    token_bytes = config.layers * kv_cache.token_bytes(options.cache_type, config.kv_num_heads, config.head_size)
    block_bytes, available = options.block_size * token_bytes, available_bytes()
    if available is not None and blocks * block_bytes > available:
        yield (
            f"the cache takes {shown_bytes(blocks * block_bytes)}, and {shown_bytes(available)} of memory are free "
            f"here; give --num-blocks {fitting_blocks(available, block_bytes)} or fewer."
        )


def _estimated_bytes(file: GGUFFile, options: GraphOptions) -> int:
    elements = 0
    for info in file.tensors.values():
        count = 1
        for extent in info.shape:
            count *= extent
        elements += count
    return elements * (4 if options.weight_form == "float32" else 1)


def _version() -> str:
    from . import __version__

    return __version__
