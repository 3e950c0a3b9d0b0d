"""octavo inside stock onnxruntime and onnxruntime-genai: finding and registering the custom-op library.

session_options = onnxruntime.SessionOptions()
octavo.register(session_options)                     # then InferenceSession(path, session_options)

model = onnxruntime_genai.Model(octavo.genai_config("model_folder"))
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import OctavoError, first_line
from .model_folder import CONFIG_FILE, read_config

if TYPE_CHECKING:
    import onnxruntime
    import onnxruntime_genai

LIBRARY_NAME = "liboctavo_ort.so"  # also its SONAME
LIBRARY_VARIABLE = "OCTAVO_ORT_LIBRARY"

_loaded: dict[str, ctypes.CDLL] = {}


def get_library_path() -> str:
    """Full path of the custom-op library, for SessionOptions.register_custom_ops_library.

    The environment variable OCTAVO_ORT_LIBRARY, meant for developing octavo, names another file. Otherwise the library
    is the one installed with this package.

    Raises OctavoError where there is none.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise OctavoError(f"{LIBRARY_VARIABLE} names {chosen}, which is not a file; unset it or correct it.")
        return str(Path(chosen).absolute())
    package = Path(__file__).resolve().parent
    for candidate in (package / "lib" / LIBRARY_NAME, package / LIBRARY_NAME):
        if candidate.is_file():
            return str(candidate)
    raise OctavoError(
        f"{LIBRARY_NAME} is not installed with the octavo package in {package}; "
        f"install octavo with `pip install .`, or set {LIBRARY_VARIABLE} to a build of it."
    )


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Makes com.microsoft::PagedAttention run on octavo in sessions made with `session_options`.

    Raises OctavoError where the library is absent or this onnxruntime refuses it.
    """
    path = get_library_path()
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # onnxruntime has no exception class of its own for this
        raise OctavoError(f"onnxruntime refused {path}: {first_line(error)}") from error


def preload() -> str:
    """Loads the library into this process and returns the name to give as custom_ops_library.

    onnxruntime-genai accepts a library inside the model folder only, or a bare name that the loader can resolve. A
    library that is loaded already resolves by its SONAME, so model folders need no copy of it.
    """
    path = get_library_path()
    if path not in _loaded:
        try:
            _loaded[path] = ctypes.CDLL(path)
        except OSError as error:
            raise OctavoError(f"{path} cannot be loaded: {first_line(error)}") from error
    return LIBRARY_NAME


def require_no_nul(text: str, what: str) -> None:
    """Raises OctavoError for a text with a NUL character, where onnxruntime-genai would end it without a word."""
    if "\0" in text:
        raise OctavoError(f"{what} holds a NUL character (at {text.index(chr(0)):,}); take it out.")


def genai_config(model_dir: str | os.PathLike[str], **overrides: Any) -> onnxruntime_genai.Config:
    """An onnxruntime-genai Config of `model_dir` that finds octavo's library.

    Args:
        model_dir: a folder written by `octavo convert`, or any genai folder whose graph uses PagedAttention.
        overrides: top-level keys merged over genai_config.json, e.g. engine={"dynamic_batching": {"num_blocks": 64}}.

    Raises OctavoError where the folder is not a whole model or the library is absent.
    """
    read_config(model_dir)
    library = preload()
    try:
        import onnxruntime_genai as og
    except ModuleNotFoundError as error:
        raise OctavoError(f"onnxruntime-genai is not installed ({error}); pip install it.") from error
    except ImportError as error:
        raise OctavoError(f"onnxruntime-genai cannot be imported: {first_line(error)}") from error

    try:
        config = og.Config(str(model_dir))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"custom_ops_library": library}}}}))
        if overrides:
            config.overlay(json.dumps(overrides))
    except Exception as error:  # onnxruntime-genai has no exception class of its own
        file = Path(model_dir) / CONFIG_FILE
        raise OctavoError(f"onnxruntime-genai refused {file}: {first_line(error)}") from error
    return config
