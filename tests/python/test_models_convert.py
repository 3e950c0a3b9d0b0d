"""octavo convert. Risks: rows permuted wrongly, a quantised mapping that is not exact, half-written folders."""

from __future__ import annotations

import errno
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from models_support import (
    PagedModel,
    TinyShape,
    numpy_llama,
    require_library,
    stock_logits,
    stock_session,
    write_tiny_gguf,
)

import octavo.convert
from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.graph import GraphOptions
from octavo.model_folder import REQUIRED_FILES

TOLERANCE = 1e-5  # of the range of the logits; float32 sums of these sizes err by 1e-6
SHAPES = {
    "tied": TinyShape(),
    "untied, biases, partial and scaled rotation": TinyShape(
        tied=False, biases=True, rope_divisors=True, rotary_dim=16, head_size=32, heads=3, kv_heads=1
    ),
}
# Forms that keep the stored codes must be as exact as float32 weights.
EXACT = [("F32", "float32"), ("F16", "float32"), ("BF16", "float32"), ("Q4_0", "float32")]
EXACT += [(kind, "int4") for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")] + [("Q5_1", "int8")]


def converted(folder: Path, shape: TinyShape, kind: str = "F32", **options: object) -> dict[str, np.ndarray]:
    """Writes and converts a tiny model; folder/model is the result. Returns the stored tensors."""
    stored = write_tiny_gguf(folder / "tiny.gguf", shape, kind)
    convert(folder / "tiny.gguf", folder / "model", GraphOptions(accuracy_level=1, **options))  # type: ignore[arg-type]
    return stored


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.ptp(expected))


@pytest.mark.parametrize(("kind", "form"), EXACT)
@pytest.mark.parametrize("name", SHAPES)
def test_stock_attention_on_the_converted_weights_equals_the_definition(
    tmp_path: Path, name: str, kind: str, form: str
) -> None:
    shape = SHAPES[name]
    stored = converted(tmp_path, shape, kind, weight_form=form)
    ids = np.random.default_rng(3).integers(0, shape.vocab, 60)
    got = stock_logits(stock_session(tmp_path / "model"), ids)
    assert relative_error(got, numpy_llama(stored, shape, ids)) < TOLERANCE


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_superblocks_stay_exact_in_the_graph(tmp_path: Path, kind: str) -> None:
    """Blocks of 16 and of 32 columns, with and without offsets; rows of whole super-blocks of 256."""
    shape = TinyShape(layers=1, hidden=256, feed=512, heads=4, kv_heads=2, head_size=64, rotary_dim=64)
    stored = converted(tmp_path, shape, kind, weight_form="int4")
    operators = [n.op_type for n in onnx.load(tmp_path / "model/model.onnx", load_external_data=False).graph.node]
    assert operators.count("MatMulNBits") == 6
    ids = np.random.default_rng(3).integers(0, shape.vocab, 30)
    got = stock_logits(stock_session(tmp_path / "model"), ids)
    assert relative_error(got, numpy_llama(stored, shape, ids)) < TOLERANCE


@pytest.mark.parametrize(("kind", "form"), [("F32", "float32"), ("Q4_1", "int4"), ("Q8_0", "int4")])
@pytest.mark.parametrize("name", SHAPES)
def test_paged_attention_equals_the_definition(tmp_path: Path, name: str, kind: str, form: str) -> None:
    """Two sequences, prefilled together and then fed token by token, over random block tables."""
    require_library()
    shape = SHAPES[name]
    stored = converted(tmp_path, shape, kind, weight_form=form)
    rng = np.random.default_rng(5)
    texts = {0: rng.integers(0, shape.vocab, 50), 1: rng.integers(0, shape.vocab, 37)}
    expected = {key: numpy_llama(stored, shape, ids) for key, ids in texts.items()}
    model = PagedModel(tmp_path / "model", num_blocks=16)
    got = model.step({key: ids[:30] for key, ids in texts.items()})
    for length in range(30, 37):
        for key in texts:
            assert relative_error(got[key], expected[key][length - 1]) < TOLERANCE
        got = model.step({key: texts[key][length : length + 1] for key in (1, 0)})


def test_float16_cache(tmp_path: Path) -> None:
    require_library()
    shape = TinyShape()
    stored = converted(tmp_path, shape, weight_form="float32", cache_type="float16")
    ids = np.random.default_rng(5).integers(0, shape.vocab, 50)
    got = PagedModel(tmp_path / "model", num_blocks=8).step({0: ids})[0]
    # float16 keeps 11 bits of K and V; without the cache's rounding the error would be below 1e-6.
    assert 1e-6 < relative_error(got, numpy_llama(stored, shape, ids)[-1]) < 2e-3


def test_forms_that_cannot_be_stacked_stay_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, K and V stored in different types (as Q4_K_M files do) become three inputs instead of one packed."""
    shape = TinyShape()
    original = octavo.graph.weights.load

    def load(file: object, name: str, form: str, is_head: bool = False) -> object:
        return original(file, name, "float32" if "attn_v" in name else form, is_head)

    monkeypatch.setattr(octavo.graph.weights, "load", load)
    stored = converted(tmp_path, shape, "Q4_1", weight_form="int4")
    node = next(
        n for n in onnx.load(tmp_path / "model/model.onnx", load_external_data=False).graph.node if "Paged" in n.op_type
    )
    assert all(node.input[:3])
    ids = np.random.default_rng(3).integers(0, shape.vocab, 40)
    got = stock_logits(stock_session(tmp_path / "model"), ids)
    assert relative_error(got, numpy_llama(stored, shape, ids)) < TOLERANCE


def test_the_graph_is_valid_and_declares_what_the_engine_feeds(tmp_path: Path) -> None:
    converted(tmp_path, TinyShape(), "Q4_1")
    model = onnx.load(tmp_path / "model/model.onnx", load_external_data=False)
    inputs = {value.name: value for value in model.graph.input}
    assert [d.dim_value for d in inputs["attention_metadata"].type.tensor_type.shape.dim] == [3]
    assert model.graph.output[-1].type.tensor_type.shape.dim[0].dim_param == "batch_size"
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    assert len(nodes) == 2 and all(len(node.input) == 17 and not node.input[1] and not node.input[2] for node in nodes)
    assert {opset.domain: opset.version for opset in model.opset_import}["com.microsoft"] == 1
    config = json.loads((tmp_path / "model/genai_config.json").read_text())
    batching = config["engine"]["dynamic_batching"]
    assert batching["block_size"] == 16 and batching["num_blocks"] >= 1


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_a_tied_head_is_stored_once(tmp_path: Path, form: str) -> None:
    sizes = {}
    for tied in (True, False):
        folder = tmp_path / str(tied)
        folder.mkdir()
        converted(folder, TinyShape(vocab=4096, tied=tied), "Q8_0", weight_form=form)
        sizes[tied] = (folder / "model/model.onnx.data").stat().st_size
    matrix = 4096 * 96 * (4 if form == "float32" else 1)
    assert sizes[True] + matrix <= sizes[False]


class TestFolder:
    """A model folder is whole or absent, and nothing else is touched."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape())
        return tmp_path / "tiny.gguf"

    def test_whole(self, source: Path, tmp_path: Path) -> None:
        steps: list[tuple[int, int]] = []
        convert(source, tmp_path / "a/b/out", progress=lambda step, done, total: steps.append((done, total)))
        assert {path.name for path in (tmp_path / "a/b/out").iterdir()} == {*REQUIRED_FILES, "model.onnx.data"}
        assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["out"]
        assert steps == [(done, steps[0][1]) for done in range(1, steps[0][1] + 1)]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
    def test_nothing_remains_of_an_interrupted_run(
        self, source: Path, tmp_path: Path, error: type[BaseException] | BaseException
    ) -> None:
        def progress(step: str, done: int, total: int) -> None:
            if done == total - 1:
                raise error

        expected = OctavoError if isinstance(error, OSError) else error
        with pytest.raises(expected):  # type: ignore[arg-type]
            convert(source, tmp_path / "out", progress=progress)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_an_existing_model_is_replaced_with_force_only(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        convert(source, out)
        with pytest.raises(OctavoError, match="--force"):
            convert(source, out)
        before = (out / "model.onnx").stat().st_mtime_ns
        convert(source, out, force=True)
        assert (out / "model.onnx").stat().st_mtime_ns != before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]

    def test_a_failed_replacement_leaves_the_old_model(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        convert(source, out)
        before = (out / "model.onnx").read_bytes()

        def progress(step: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(source, out, force=True, progress=progress)
        assert (out / "model.onnx").read_bytes() == before

    def test_other_files_are_never_replaced(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/thesis.txt").write_text("years of work")
        for target in (tmp_path / "mine", tmp_path / "mine/thesis.txt", tmp_path / "mine/thesis.txt/out", source):
            with pytest.raises(OctavoError):
                convert(source, target, force=True)
        assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"

    def test_force_deletes_only_what_convert_wrote(self, source: Path, tmp_path: Path) -> None:
        """The source itself, a note beside the model, another tool's model: each is refused by name, and stays."""
        out = tmp_path / "out"
        convert(source, out)
        inside = out / "tiny.gguf"
        source.rename(inside)
        with pytest.raises(OctavoError, match=r"'tiny\.gguf', which octavo convert did not write"):
            convert(inside, out, force=True)
        inside.rename(source)
        (out / "tokenizer.json").rename(tmp_path / "kept")
        (out / "tokenizer.json").mkdir()
        with pytest.raises(OctavoError, match=r"'tokenizer\.json', which"):
            convert(source, out, force=True)
        (out / "tokenizer.json").rmdir()
        (tmp_path / "kept").rename(out / "tokenizer.json")
        configuration = (out / "genai_config.json").read_text()
        for foreign in (configuration.replace('"log_id": "octavo"', '"log_id": "other"'), "[]", '{"model": [1]}'):
            (out / "genai_config.json").write_text(foreign)
            with pytest.raises(OctavoError, match="a model that octavo convert did not write"):
                convert(source, out, force=True)
        (out / "genai_config.json").write_text(configuration)
        convert(source, out, force=True)

    def test_files_that_come_during_a_forced_conversion_stay(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        convert(source, out)

        def progress(step: str, done: int, total: int) -> None:
            (out / "notes.txt").write_text("mine")

        with pytest.raises(OctavoError, match=r"notes\.txt"):
            convert(source, out, force=True, progress=progress)
        assert (out / "notes.txt").read_text() == "mine" and (out / "model.onnx").is_file()

    def test_of_two_conversions_at_once_one_wins(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"

        def progress(step: str, done: int, total: int) -> None:
            if done == 1:
                convert(source, out)

        with pytest.raises(OctavoError, match="already holds a model"):
            convert(source, out, progress=progress)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]

    def test_a_link_stays_a_link(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        link = tmp_path / "link"
        link.symlink_to("disk/model")
        for force in (False, True):
            convert(source, link, force=force)
            assert link.is_symlink() and (tmp_path / "disk/model/model.onnx").is_file()
            assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "tiny.gguf"]

    def test_a_replacement_that_fails_halfway_restores_the_old_model(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        convert(source, out)
        before = (out / "model.onnx").stat().st_ino
        rename = Path.rename

        def fail(self: Path, target: Path) -> Path:
            if self.name == "model":
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, force=True)
        assert (out / "model.onnx").stat().st_ino == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_nothing_remains_after_a_signal(self, source: Path, tmp_path: Path, number: signal.Signals) -> None:
        """As by kill, a closed terminal or a job's end; the program's own handling is as before afterwards."""

        def progress(step: str, done: int, total: int) -> None:
            os.kill(os.getpid(), number)

        before = signal.signal(number, signal.SIG_DFL)
        try:
            with pytest.raises(SystemExit) as stop:
                convert(source, tmp_path / "out", progress=progress)
            assert signal.getsignal(number) is signal.SIG_DFL
        finally:
            signal.signal(number, before)
        assert stop.value.code == 128 + number
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_an_ignored_signal_stays_ignored(self, source: Path, tmp_path: Path) -> None:
        """nohup octavo convert ... outlives its terminal."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            convert(source, tmp_path / "out", progress=lambda step, done, total: os.kill(os.getpid(), signal.SIGHUP))
        finally:
            signal.signal(signal.SIGHUP, before)
        assert (tmp_path / "out/model.onnx").is_file()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_second_signal_does_not_stop_the_cleaning(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ) -> None:
        """Risk: who presses Ctrl-C twice keeps a hidden folder as large as the model."""
        remove = octavo.genai_folder.shutil.rmtree

        def slow(path: Path, ignore_errors: bool = False) -> None:
            os.kill(os.getpid(), number)
            remove(path, ignore_errors=ignore_errors)

        def progress(step: str, done: int, total: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(octavo.genai_folder.shutil, "rmtree", slow)
        before = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "out", progress=progress)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
            convert(source, tmp_path / "out")  # the signal comes when all but the cleaning is done
        finally:
            for other, taken in before.items():
                signal.signal(other, taken)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]

    def test_an_empty_folder_is_filled(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Risk: the folder in which the user stands is replaced by another of its name."""
        out = tmp_path / "out"
        out.mkdir(mode=0o750)
        before = out.stat()
        monkeypatch.chdir(out)
        for force in (False, True):
            convert(source, ".", force=force)
            assert (out.stat().st_ino, out.stat().st_mode) == (before.st_ino, before.st_mode)
            assert Path.cwd() == out and set(REQUIRED_FILES) < set(os.listdir())
            assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
            if not force:
                with pytest.raises(OctavoError, match="is the current folder, which --force cannot replace"):
                    convert(source, ".", force=True)
                for path in out.iterdir():
                    path.unlink()

    def test_an_empty_folder_may_be_a_disk_of_its_own(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a container's volume is: files can be copied into it, not renamed."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        out = tmp_path / "out"
        out.mkdir()
        monkeypatch.setattr(os, "rename", refuse)
        convert(source, out)
        assert set(REQUIRED_FILES) < set(os.listdir(out))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]

    def test_of_two_conversions_into_an_empty_folder_one_wins(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other ends while this one moves its first file, of which nothing is left, nor of the rest."""
        out = tmp_path / "out"
        out.mkdir()
        move = octavo.genai_folder.shutil.move

        def other_comes(file: Path, target: Path) -> Path:
            (out / "tokenizer.json").write_text("the other's")
            return move(file, target)

        monkeypatch.setattr(octavo.genai_folder.shutil, "move", other_comes)
        with pytest.raises(OctavoError, match="already holds a model"):
            convert(source, out)
        assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
        assert (out / "tokenizer.json").read_text() == "the other's"

    def test_a_folder_name_that_is_no_text_is_refused(self, source: Path, tmp_path: Path) -> None:
        """Risk: a model that no runtime can open is written for minutes."""
        with pytest.raises(OctavoError, match=r"out\\udcff' is not UTF-8 text"):
            convert(source, tmp_path / "out\udcff")
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

    def test_an_input_that_cannot_be_read_is_named(self, source: Path, tmp_path: Path) -> None:
        """Risk: the folder is blamed, which can be written well."""

        def progress(step: str, done: int, total: int) -> None:
            Path("/absent/text").read_bytes()

        with pytest.raises(OctavoError, match=r"^/absent/text cannot be read: No such file or directory\.$"):
            convert(source, tmp_path / "out", progress=progress)
        for folder in ("/proc/octavo", "/proc/octavo/deep/model"):
            with pytest.raises(OctavoError, match=f"^{folder} cannot be written"):
                convert(source, folder)

    def test_a_folder_that_cannot_be_looked_at_is_named(self, source: Path) -> None:
        with pytest.raises(OctavoError, match=r"xxx cannot be read: File name too long\."):
            convert(source, "x" * 300)

    def test_other_threads_can_convert(self, source: Path, tmp_path: Path) -> None:
        """Python sets signal handlers in its main thread only."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(convert, source, tmp_path / "out").result()

    def test_an_unwritable_place_is_named(self, source: Path) -> None:
        with pytest.raises(OctavoError, match="/proc/octavo cannot be written"):
            convert(source, "/proc/octavo")

    def test_a_full_disk_is_refused_beforehand(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(octavo.genai_folder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(OctavoError, match="MiB left"):
            convert(source, tmp_path / "out")
