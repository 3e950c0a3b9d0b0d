"""What a model folder holds, and reading its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import OctavoError, quoted

CONFIG_FILE = "genai_config.json"  # written last: a folder without it is not a model
SETTINGS_FILE = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", SETTINGS_FILE)
TEMPLATE_FILE = "chat_template.jinja"  # where other tools write the chat template
GRAPH_FILE = "model.onnx"  # unless model.decoder.filename in genai_config.json names another
REQUIRED_FILES = (CONFIG_FILE, GRAPH_FILE, *TOKENIZER_FILES)
WRITTEN_FILES = (*REQUIRED_FILES, "model.onnx.data")  # all that octavo convert writes
ORDINARY_PROMPT = 64  # tokens; less room than that is hardly meant
LOG_ID = "octavo"  # session_options.log_id in genai_config.json: the mark of a folder that octavo convert wrote


def read_config(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """genai_config.json of a model folder. Raises OctavoError where the folder is not a (whole) model."""
    folder = Path(model_dir)
    try:
        if not folder.is_dir():
            what = (
                "is a file; give the folder that octavo convert wrote"
                if folder.exists()
                else "does not exist; check the path"
            )
            raise OctavoError(f"{folder} {what}.")
        missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    except OSError as error:
        raise OctavoError(f"{folder} cannot be read: {error.strerror or error}.") from error
    config = None
    if missing == [GRAPH_FILE]:
        config = read_json(folder / CONFIG_FILE)
        missing = [] if graph_file(folder, config) != folder / GRAPH_FILE else missing
    if missing:
        raise OctavoError(
            f"{folder} is not a whole model folder: {', '.join(missing)} missing; run octavo convert again."
        )
    return read_json(folder / CONFIG_FILE) if config is None else config


def graph_file(model_dir: str | os.PathLike[str], config: dict[str, Any]) -> Path:
    """The ONNX file of a model folder, which may be absent. Raises OctavoError where its name is no text."""
    value = dig(config, "model", "decoder", "filename")
    if value is not None and (not isinstance(value, str) or not value):
        raise OctavoError(f"model.decoder.filename in {CONFIG_FILE} must be a file's name; it is {quoted(value)}.")
    return Path(model_dir) / (value or GRAPH_FILE)


def chat_template_file(model_dir: str | os.PathLike[str]) -> str:
    """The name of the file whose chat template onnxruntime-genai takes; empty where there is none.

    Raises OctavoError where tokenizer_config.json cannot be read.
    """
    settings = read_json(Path(model_dir) / SETTINGS_FILE)
    if "chat_template" in settings:
        return SETTINGS_FILE if settings["chat_template"] else ""
    return TEMPLATE_FILE if (Path(model_dir) / TEMPLATE_FILE).is_file() else ""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises OctavoError where it is none, with the line of the mistake."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise OctavoError(
            f"{file} is not valid JSON: {error.msg} (column {error.colno}); fix line {error.lineno}."
        ) from None
    except OSError as error:
        raise OctavoError(f"{file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise OctavoError(f"{file} is not UTF-8 text (byte {error.start}).") from None
    except ValueError:  # of int(): Python limits its digits
        raise OctavoError(f"{file} holds a number of thousands of digits.") from None
    except RecursionError:
        raise OctavoError(f"{file} is nested too deeply to be read.") from None
    if not isinstance(content, dict):
        raise OctavoError(f"{file} must hold a JSON object.")
    return content


def dig(value: Any, *keys: str) -> Any:
    """What stands in nested dictionaries, by its keys from outside in. None where there is nothing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def config_number(config: dict[str, Any], *keys: str) -> int:
    """A positive whole number of genai_config.json, as dig. Raises OctavoError for another."""
    value = dig(config, *keys)
    if type(value) is int and value > 0:  # True is an int too
        return value
    found = "it is missing" if value is None else f"it is {quoted(value)}"
    raise OctavoError(f"{'.'.join(keys)} in {CONFIG_FILE} must be a positive whole number; {found}.")
