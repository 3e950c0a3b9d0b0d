"""`octavo doctor`: does a model folder fit its own parts, octavo's library and the installed runtimes?

Each check is a function that returns findings; a later check runs only where those it builds on passed.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from .errors import OctavoError, counted, first_line, quoted, shown
from .explain import unknown_attributes
from .memory import available_bytes, fitting_blocks
from .model_folder import (
    CONFIG_FILE,
    ORDINARY_PROMPT,
    REQUIRED_FILES,
    SETTINGS_FILE,
    chat_template_file,
    dig,
    read_config,
    read_json,
)
from .onnx_model import ABSOLUTE, OUTSIDE, OnnxModel, ValueType, read_model, why_unreadable
from .progress import Progress, no_progress
from .runtime import LIBRARY_NAME, genai_config, get_library_path, register
from .sizes import token_bytes
from .trial import NO_ANSWER, NO_TEMPLATE, try_engine

MINIMUM_VERSIONS = {"onnxruntime": (1, 23), "onnxruntime-genai": (0, 18)}
_WITHOUT_TEMPLATE = "take it out and use octavo generate --raw"
_ENGINE_INPUTS = ("input_ids", "cumulative_sequence_lengths", "past_sequence_lengths", "block_table")


@dataclass(frozen=True)
class Finding:
    """One check's result. detail: what was found; advice: what to do, empty where ok."""

    check: str
    ok: bool
    detail: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"check": self.check, "ok": self.ok, "detail": self.detail, "advice": self.advice}

    def rich_text(self) -> str:
        return escape(shown(self.detail)) + (f"\n[bold]{escape(shown(self.advice))}[/]" if self.advice else "")


def examine(model_dir: str | os.PathLike[str], progress: Progress = no_progress) -> list[Finding]:
    """All findings about a model folder and this installation. Never raises for what is wrong with the folder.

    progress: called as (step, steps done, steps in all).
    """
    folder = Path(model_dir)
    progress("reading", 0, 4)
    findings = [*_versions(), _library()]
    try:
        config = read_config(folder)
        findings.append(Finding("folder", True, ", ".join(REQUIRED_FILES)))
    except OctavoError as error:
        return [*findings, Finding("folder", False, str(error))]  # it says what to do itself
    name = str(dig(config, "model", "decoder", "filename") or "model.onnx")
    try:
        model = read_model(folder / name)
    except OctavoError as error:
        mistyped = name != "model.onnx" and _file_size(folder / name) is None
        advice = f"correct model.decoder.filename in {CONFIG_FILE}" if mistyped else "run octavo convert again"
        return [*findings, Finding("graph", False, str(error), advice)]
    findings += [*_graph(folder, model, config), *_config(config, model), *_tokenizer(folder, config)]
    if all(finding.ok for finding in findings):
        progress("one token", 1, 4)
        findings.append(_first_step(model, config))
    if all(finding.ok for finding in findings):
        progress("tokenizer", 2, 4)
        findings.append(_genai_reads(folder))
    if all(finding.ok for finding in findings):
        progress("engine", 3, 4)
        findings.append(_engine_runs(folder, config))
    return findings


def _versions() -> Iterator[Finding]:
    for package, minimum in MINIMUM_VERSIONS.items():
        wanted = ".".join(map(str, minimum))
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, False, "not installed", f'pip install "{package}>={wanted}"')
            continue
        numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
        ok = numbers >= minimum
        yield Finding(package, ok, version, "" if ok else f'too old: pip install "{package}>={wanted}"')


def _library() -> Finding:
    import onnxruntime as ort

    try:
        path = get_library_path()
    except OctavoError as error:
        return Finding("octavo library", False, str(error))  # it says what to do itself
    try:
        register(ort.SessionOptions())
    except OctavoError as error:
        return Finding("octavo library", False, str(error), "reinstall octavo for this machine")
    return Finding("octavo library", True, path)


def _graph(folder: Path, model: OnnxModel, config: dict[str, Any]) -> Iterator[Finding]:
    count = len(model.nodes)
    yield Finding(
        "graph",
        count > 0,
        counted(count, "PagedAttention node"),
        "" if count else "this graph has other attention; convert the model with octavo convert",
    )
    dropped = {}  # attribute -> what to say; the same mistake is in every layer
    for node in model.nodes:
        for name, nearest in unknown_attributes(node).items():
            dropped[name] = f"{name} in {node.name}" + (f": rename it {nearest}" if nearest else ": remove it")
    yield Finding(
        "attributes",
        not dropped,
        "all of them PagedAttention's" if not dropped else f"not of PagedAttention, so ignored: {', '.join(dropped)}",
        "; ".join(dropped.values()),
    )
    for location, needed in model.external_bytes.items():
        why = why_unreadable(model.path, location)
        size = None if why else _file_size(model.path.parent / location)
        ok = size is not None and size >= needed
        place = os.path.relpath(model.path.parent / location, folder) if why != ABSOLUTE else location
        detail = f"{place} cannot be read: {why}" if size is None else f"{place}: {size:,} bytes"
        advice = f"it needs {needed:,} bytes: copy it again, or convert again"
        if why == os.strerror(errno.EACCES):
            advice = "give yourself the right to read it"
        elif why in (ABSOLUTE, OUTSIDE):
            advice = "save the graph again with its weights in one file beside it"
        yield Finding("weights", ok, detail, "" if ok else advice)
    renamed = _section(config, "model", "decoder", "inputs")
    missing = [name for name in _ENGINE_INPUTS if renamed.get(name, name) not in model.inputs]
    yield Finding(
        "graph inputs",
        not missing,
        "names as the engine feeds them" if not missing else f"not in the graph: {', '.join(missing)}",
        "" if not missing else f"map them in model.decoder.inputs of {CONFIG_FILE}, or convert again",
    )
    metadata = model.inputs.get("attention_metadata")
    if metadata is not None and metadata.shape is not None:
        ok = len(metadata.shape) == 1 and (not isinstance(metadata.shape[0], int) or metadata.shape[0] == 3)
        advice = "" if ok else "the engine feeds three numbers: declare the input as [3], or convert again"
        yield Finding("attention_metadata", ok, f"declared {list(metadata.shape)}", advice)


def _file_size(file: Path) -> int | None:
    """None for what is no file, or cannot be looked at: its name may be too long for one."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def _config(config: dict[str, Any], model: OnnxModel) -> Iterator[Finding]:
    kind = dig(config, "model", "type")
    ok = isinstance(kind, str) and bool(kind)
    advice = "" if ok else f'set model.type to "llama" or "decoder" in {CONFIG_FILE}'
    yield Finding("type", ok, f"{kind}", advice)
    yield from _context_length(config, model)
    yield from _engine_section(config, model)
    decoder = _section(config, "model", "decoder")
    for key, got in _graph_numbers(model).items():
        written = dig(config, "model", key) if key == "vocab_size" else decoder.get(key)
        ok = written == got
        advice = "" if ok else f"set {key} to {got} in {CONFIG_FILE}"
        yield Finding(key, ok, f"graph {got}, config {written}", advice)
    yield _library_setting(decoder)


def _engine_section(config: dict[str, Any], model: OnnxModel) -> Iterator[Finding]:
    batching = dig(config, "engine", "dynamic_batching")
    if not isinstance(batching, dict):
        advice = f'add "engine": {{"dynamic_batching": {{"block_size": ..., "num_blocks": ...}}}} to {CONFIG_FILE}'
        yield Finding(
            "engine", False, "no engine.dynamic_batching section: the engine cannot run a paged graph", advice
        )
        return
    static = _block_size(model)
    written = batching.get("block_size")
    ok = isinstance(written, int) and written > 0 and static in (None, written)
    advice = "" if ok else f"set engine.dynamic_batching.block_size to {static or 16} in {CONFIG_FILE}"
    yield Finding("block_size", ok, f"graph {static or 'any'}, config {written}", advice)
    block_size = static or (written if ok else None)
    blocks = batching.get("num_blocks")
    if not isinstance(blocks, int) or blocks <= 0:
        detail = "missing: on a CPU the engine cannot choose it" if blocks is None else f"{blocks}"
        advice = f"set engine.dynamic_batching.num_blocks, e.g. to 256, in {CONFIG_FILE}"
        yield Finding("num_blocks", False, detail, advice)
    elif block_size is not None:
        yield _cache_size(blocks, block_size, model)


def _cache_size(blocks: int, block_size: int, model: OnnxModel) -> Finding:
    """Is the cache large enough to be of use, and small enough for this machine?"""
    tokens, block_bytes = blocks * block_size, _block_bytes(model, block_size)
    size = f", {blocks * block_bytes / 2**20:,.1f} MiB" if block_bytes else ""
    detail = f"{counted(blocks, 'block')}, {counted(tokens, 'token')} of cache{size}"
    setting = f"engine.dynamic_batching.num_blocks in {CONFIG_FILE}"
    if tokens < ORDINARY_PROMPT:
        advice = f"too small for an ordinary prompt: set {setting}, e.g. to {-(-2048 // block_size)}"
        return Finding("num_blocks", False, detail, advice)
    available = available_bytes()
    if available is not None and blocks * block_bytes > available:
        fitting = fitting_blocks(available, block_bytes)
        advice = f"set {setting} to at most {fitting}, or pass --num-blocks {fitting} to octavo generate"
        return Finding("num_blocks", False, f"{detail}; {available / 2**20:,.0f} MiB of memory are free", advice)
    return Finding("num_blocks", True, detail)


def _block_bytes(model: OnnxModel, block_size: int) -> int:
    """Bytes of one block in all layers; caches whose size the graph does not tell count nothing."""
    return block_size * sum(token_bytes(model, node) or 0 for node in model.nodes)


def _context_length(config: dict[str, Any], model: OnnxModel) -> Iterator[Finding]:
    written = dig(config, "model", "context_length")
    if not isinstance(written, int) or written <= 0:
        advice = f"set model.context_length in {CONFIG_FILE}"
        yield Finding("context_length", False, "missing" if written is None else f"{written}", advice)
        return
    tables = [
        model.type_of(node.inputs.get("cos_cache")) for node in model.nodes if node.attributes.get("do_rotary") == 1
    ]
    rows = min((t.shape[0] for t in tables if t is not None and t.shape and isinstance(t.shape[0], int)), default=None)
    detail = f"{written:,}" if rows is None else f"config {written:,}, cos_cache in the graph {rows:,} rows"
    advice = ""
    if rows is not None and written > rows:
        advice = f"set model.context_length to at most {rows} in {CONFIG_FILE}"
    elif written < ORDINARY_PROMPT:
        advice = f"too short for an ordinary prompt: raise model.context_length in {CONFIG_FILE}"
    yield Finding("context_length", not advice, detail, advice)


def _graph_numbers(model: OnnxModel) -> dict[str, int]:
    """Keys of genai_config.json that the graph fixes too."""
    numbers: dict[str, int] = {"num_hidden_layers": len(model.nodes)}
    if not model.nodes:
        return numbers
    node = model.nodes[0]
    for key, attribute in (("num_attention_heads", "num_heads"), ("num_key_value_heads", "kv_num_heads")):
        if isinstance(node.attributes.get(attribute), int):
            numbers[key] = node.attributes[attribute]
    cache = model.type_of(node.inputs.get("key_cache"))
    if cache is not None and cache.shape is not None and isinstance(cache.shape[-1], int):
        packed = node.attributes.get("k_cache_dtype") in ("int4", "float4e2m1")
        numbers["head_size"] = cache.shape[-1] * (2 if packed else 1)
    logits = model.outputs.get("logits")
    if logits is not None and logits.shape and isinstance(logits.shape[-1], int):
        numbers["vocab_size"] = logits.shape[-1]
    return numbers


def _library_setting(decoder: dict[str, Any]) -> Finding:
    written = dig(decoder, "session_options", "custom_ops_library")
    ok = written in (None, LIBRARY_NAME)
    detail = (
        f"custom_ops_library: {written}" if written else "not written: only octavo's own tools will find the library"
    )
    advice = "" if ok else f'octavo replaces it when it loads the model; for other programs write "{LIBRARY_NAME}"'
    return Finding("library setting", ok, detail, advice)


def _tokenizer(folder: Path, config: dict[str, Any]) -> Iterator[Finding]:
    vocab_size = dig(config, "model", "vocab_size")
    try:
        highest = max(_token_ids(read_json(folder / "tokenizer.json")))
        settings = read_json(folder / SETTINGS_FILE)
    except OctavoError as error:
        yield Finding("tokenizer", False, str(error), "run octavo convert again")
        return
    ok = isinstance(vocab_size, int) and highest < vocab_size
    advice = "" if ok else "the tokenizer belongs to another model: convert again"
    yield Finding("tokenizer", ok, f"highest token id {highest}, vocab_size {vocab_size}", advice)
    stops = dig(config, "model", "eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    ok = bool(stops) and all(isinstance(stop, int) and 0 <= stop <= highest for stop in stops)
    advice = "" if ok else f"set model.eos_token_id in {CONFIG_FILE} to the id of the end token"
    yield Finding("end tokens", ok, f"{stops}", advice)
    yield _chat_template(settings.get("chat_template", ""), chat_template_file(folder))


def _chat_template(written: Any, file: str) -> Finding:
    """written: in tokenizer_config.json; file: the one that onnxruntime-genai takes."""
    if isinstance(written, str):
        return Finding("chat template", True, f"in {file}" if file else "none: use octavo generate --raw")
    detail = f"chat_template in {SETTINGS_FILE} is {quoted(written)}"
    return Finding("chat template", False, detail, f"make it a text, or {_WITHOUT_TEMPLATE}")


def _token_ids(tokenizer: dict[str, Any]) -> list[int]:
    vocabulary = dig(tokenizer, "model", "vocab")
    added = tokenizer.get("added_tokens", [])
    if isinstance(vocabulary, list):  # Unigram: [text, score] in the order of the ids
        vocabulary = {index: index for index in range(len(vocabulary))}
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise OctavoError("tokenizer.json has no model.vocab.")
    if not isinstance(added, list):
        raise OctavoError("tokenizer.json: added_tokens must be a list.")
    ids = [*vocabulary.values(), *(dig(token, "id") for token in added)]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise OctavoError("tokenizer.json has tokens whose id is no number.")
    return ids


def _first_step(model: OnnxModel, config: dict[str, Any]) -> Finding:
    """Loads the model in stock onnxruntime with octavo's library and feeds it one token."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors reach the finding
    block_size = _block_size(model) or config["engine"]["dynamic_batching"]["block_size"]
    try:
        register(options)
        session = ort.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        logits = _run_one_token(session, block_size, model.inputs)
    except Exception as error:  # whatever the runtime raises is the finding
        return Finding("one token", False, first_line(error), "convert again, or report this message")
    damaged = "the weights are damaged: convert again"
    if not np.isfinite(logits).all():
        advice = f"{damaged}; or keys or values overflow a float16 cache: convert with --kv-cache bfloat16"
        return Finding("one token", False, "logits hold NaN or infinite values", advice)
    if logits.min() == logits.max():
        return Finding("one token", False, f"all logits are {logits.max():.2f}", damaged)
    return Finding("one token", True, f"logits from {logits.min():.2f} to {logits.max():.2f}", "")


def _run_one_token(session: Any, block_size: int, types: dict[str, ValueType]) -> np.ndarray:
    import onnxruntime as ort

    feeds = {
        "input_ids": np.array([0], np.int64),
        "cumulative_sequence_lengths": np.array([0, 1], np.int32),
        "past_sequence_lengths": np.array([0], np.int32),
        "block_table": np.array([[0]], np.int32),
        "attention_metadata": np.array([1, 1, 1], np.int32),
    }
    binding = session.io_binding()
    for value in session.get_inputs():
        if value.name in feeds:
            binding.bind_cpu_input(value.name, feeds[value.name])
        else:
            shape = [
                1 if axis == 0 else (d if isinstance(d, int) else block_size) for axis, d in enumerate(value.shape)
            ]
            cache = ort.OrtValue.ortvalue_from_shape_and_type(shape, types[value.name].element_type)
            binding.bind_ortvalue_input(value.name, cache)
            binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), cache)
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[-1].numpy()  # in the order of binding


def _genai_reads(folder: Path) -> Finding:
    import onnxruntime_genai as og

    try:
        tokenizer = og.Tokenizer(genai_config(folder))
        count = len(tokenizer.encode("Hello"))
    except OctavoError as error:
        return Finding("genai reads it", False, str(error), f"correct that line of {CONFIG_FILE}")
    except Exception as error:
        return Finding("genai reads it", False, first_line(error), "run octavo convert again")
    return Finding(
        "genai reads it", count > 0, f"configuration and tokenizer load; 'Hello' is {counted(count, 'token')}"
    )


def _engine_runs(folder: Path, config: dict[str, Any]) -> Finding:
    why = try_engine(folder)
    if not why:
        return Finding("engine", True, "onnxruntime-genai's engine loads the model and generates")
    kind = dig(config, "model", "type")
    advice = "report this message"
    if why.startswith(NO_ANSWER):
        advice = "a large model may need longer: try octavo generate itself"
    elif why.startswith(NO_TEMPLATE):
        advice = f"correct the template in {chat_template_file(folder)}, or {_WITHOUT_TEMPLATE}"
    elif "bad_alloc" in why or "memory" in why or "budget" in why:
        advice = f"lower engine.dynamic_batching.num_blocks in {CONFIG_FILE}"
    elif "share one element type" in why:
        advice = (
            "convert again with one type for keys and values, e.g. --kv-cache int8; mixed caches need another engine"
        )
    elif kind not in ("llama", "decoder"):
        advice = f'model.type is "{kind}": if the engine has no such decoder, set it to "decoder" in {CONFIG_FILE}'
    return Finding("engine", False, why, advice)


def _block_size(model: OnnxModel) -> int | None:
    cache = model.type_of(model.nodes[0].inputs.get("key_cache")) if model.nodes else None
    if cache is None or cache.shape is None or len(cache.shape) != 4:
        return None
    return cache.shape[1] if isinstance(cache.shape[1], int) else None


def _section(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    value = dig(config, *keys)
    return value if isinstance(value, dict) else {}
