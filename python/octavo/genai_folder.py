"""Making the folder that onnxruntime-genai loads a model from: its configuration, and all of it or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import interrupts, kv_cache
from .architectures import ModelConfig
from .errors import OctavoError, quoted
from .graph import GraphOptions
from .model_folder import CONFIG_FILE, LOG_ID, WRITTEN_FILES, read_json
from .runtime import LIBRARY_NAME
from .tokenizer import Vocabulary

CACHE_BYTES = 512 << 20  # default size of the key-value cache


def default_num_blocks(config: ModelConfig, options: GraphOptions) -> int:
    """Blocks for four full contexts, or as many as fit CACHE_BYTES, but always enough for one block."""
    token_bytes = kv_cache.token_bytes(options.cache_type, config.kv_num_heads, config.head_size)
    affordable = CACHE_BYTES // (config.layers * token_bytes * options.block_size)
    useful = 4 * -(-config.context_length // options.block_size)
    return max(1, min(affordable, useful))


def genai_config(config: ModelConfig, options: GraphOptions, vocabulary: Vocabulary, num_blocks: int) -> dict[str, Any]:
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
            "session_options": {"log_id": LOG_ID, "custom_ops_library": LIBRARY_NAME},
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

    A link is followed: what it leads to is written. An empty folder is filled, and stays the folder that it is: it may
    be somebody's current one. SIGTERM and SIGHUP end the block as Ctrl-C does, and no second signal stops the cleaning.

    Errors: OctavoError where `target` is in use (a model of octavo convert is replaced with `force` only, and a folder
    that holds anything else never), cannot be written, or has a name that is no text.
    """
    if any("\ud800" <= character <= "\udfff" for character in str(target)):  # bytes that are not UTF-8
        raise OctavoError(f"the folder name {str(target)!a} is not UTF-8 text, which onnxruntime cannot open.")
    target = Path(os.path.realpath(target))
    _check_target(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _signals_raise():
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
            partial, old = work / "model", work / "old"
            try:
                partial.mkdir()
                yield partial
                _put_in_place(target, partial, old, force)
            finally:
                with _signals_ignored():
                    if target.exists() or not old.exists():  # else `old` is the only model there is
                        shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else ""
        if name and not Path(name).is_relative_to(target.parent) and not target.is_relative_to(name):
            raise OctavoError(f"{name} cannot be read: {error.strerror or error}.") from error  # something of the block
        raise OctavoError(f"{target} cannot be written: {error.strerror or error}.") from error


def require_space(folder: Path, byte_count: int) -> None:
    """Refuses before hours of writing what the disk cannot hold. `folder` is what new_folder gave."""
    free = shutil.disk_usage(folder).free
    if free < byte_count:
        place = folder.parent.parent
        raise OctavoError(f"{place} has {free >> 20:,} MiB left; the model needs about {byte_count >> 20:,} MiB.")


def _check_target(target: Path, force: bool) -> None:
    try:
        if not target.exists() and not target.is_symlink():
            return
        if not target.is_dir():
            raise OctavoError(f"{target} is a file; give a folder that does not exist yet.")
        content = sorted(os.listdir(target))
    except OSError as error:
        raise OctavoError(f"{target} cannot be read: {error.strerror or error}.") from error
    if not content:
        return
    if CONFIG_FILE not in content:
        raise OctavoError(f"{target} holds other files and is no model folder; give a folder that does not exist yet.")
    if not force:
        raise _holds_a_model(target)
    foreign = [name for name in content if name not in WRITTEN_FILES or not (target / name).is_file()]
    if foreign:
        raise OctavoError(
            f"{target} holds {', '.join(map(quoted, foreign[:3]))}, which octavo convert did not write and --force "
            "does not delete; move it away, or give another folder."
        )
    if not _is_ours(target):
        raise OctavoError(
            f"{target} holds a model that octavo convert did not write, and --force does not delete it; move it away, "
            "or give another folder."
        )
    if _is_current(target):
        raise OctavoError(f"{target} is the current folder, which --force cannot replace; go to another one first.")


def _is_current(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # the current folder has been deleted
        return False


def _holds_a_model(target: Path) -> OctavoError:
    return OctavoError(f"{target} already holds a model; add --force to replace it, or give another folder.")


def _is_ours(folder: Path) -> bool:
    """Whether the configuration carries octavo's mark. One that cannot be read does not."""
    value: Any = None
    try:
        value = read_json(folder / CONFIG_FILE)
    except OctavoError:
        return False
    for key in ("model", "decoder", "session_options", "log_id"):
        value = value.get(key) if isinstance(value, dict) else None
    return value == LOG_ID


def _put_in_place(target: Path, partial: Path, old: Path, force: bool) -> None:
    """Renames `partial` to `target`, with `force` after `target` to `old`. Files that came there meanwhile stay."""
    if force:
        _check_target(target, force)
    if target.is_dir() and not os.listdir(target):
        _fill(target, partial)
        return
    try:
        if force:
            with suppress(FileNotFoundError):  # nothing to replace
                target.rename(old)
        partial.rename(target)  # fails on a folder that holds anything: of two conversions one wins
    except BaseException as error:  # Ctrl-C too
        if old.exists() and not target.exists():
            old.rename(target)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _holds_a_model(target) from None
        raise


def _fill(target: Path, partial: Path) -> None:
    """Moves the files of `partial` into the empty folder `target`, all or none, its configuration last."""
    placed: list[Path] = []
    try:
        for file in sorted(partial.iterdir(), key=lambda file: (file.name == CONFIG_FILE, file.name)):
            (target / file.name).touch(exist_ok=False)  # of two conversions one wins
            placed.append(target / file.name)
            shutil.move(file, target / file.name)  # copies where `target` is a disk of its own
    except BaseException as error:  # Ctrl-C too
        for file in placed:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise _holds_a_model(target) from None
        raise


def _handled_signals() -> dict[int, Any]:
    """Signals that end a program -> how this one takes them. Empty outside the main thread, where none can be set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return {number: taken for number in numbers if (taken := signal.getsignal(number)) is not None}


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = _handled_signals()
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, taken in before.items():
            signal.signal(number, taken)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the block, so that it cleans up, where they would end the process.

    After one of them, or Ctrl-C, all are ignored: a second must not stop the cleaning up. Does nothing outside the main
    thread, where Python sets no handlers, and for a signal that has a handler or is ignored (nohup) already.
    """
    usual = (signal.SIG_DFL, signal.default_int_handler, interrupts.interrupt)
    before = {number: taken for number, taken in _handled_signals().items() if taken in usual}
    # Of the octavo command only: somebody else's program may do all its work while a module is imported.
    spares_imports = interrupts.interrupt in before.values()

    def stop(number: int, frame: Any) -> None:
        if spares_imports and interrupts.comes_later(number, frame):
            return
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        if before[number] is signal.SIG_DFL:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, taken in before.items():
            signal.signal(number, taken)
