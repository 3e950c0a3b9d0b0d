"""Commands that report: doctor, explain, and --json of all.

Risks: a fault that is not named, JSON with other text in it, an exit code of 0 for what does not run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from cli_support import Run, sentence
from models_support import TinyShape, write_tiny_gguf

import octavo.cli
import octavo.console
import octavo.trial
from octavo.errors import OctavoError
from octavo.model_folder import read_json


class TestDoctor:
    """Each way in which a folder fits badly is found and the change named."""

    @pytest.fixture
    def folder(self, library: None, model_dir: Path, tmp_path: Path) -> Path:
        copy = tmp_path / "model"
        copy.mkdir()
        for path in model_dir.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        return copy

    @staticmethod
    def edit(folder: Path, change: Callable[[dict], object]) -> None:
        path = folder / "genai_config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    def test_a_good_folder(self, run: Run, folder: Path) -> None:
        done = run("doctor", folder)
        assert done.returncode == 0 and "No problems found" in done.stdout
        assert "one token" in done.stdout and "loads the model and generates" in done.stdout

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda c: c.pop("engine"), "no engine.dynamic_batching"),
            (lambda c: c["engine"]["dynamic_batching"].pop("num_blocks"), "num_blocks, e.g."),
            (lambda c: c["engine"]["dynamic_batching"].pop("block_size"), "block_size to 16"),
            (lambda c: c["engine"]["dynamic_batching"].update(block_size=32), "block_size to 16"),
            (lambda c: c["model"].update(vocab_size=300), "set vocab_size to 288"),
            (lambda c: c["model"].update(eos_token_id=100_000), "eos_token_id"),
            (lambda c: c["model"]["decoder"].update(num_hidden_layers=3), "set num_hidden_layers to 2"),
            (lambda c: c["model"]["decoder"].update(num_key_value_heads=6), "set num_key_value_heads to 2"),
            (lambda c: c["model"]["decoder"].update(head_size=64), "set head_size to 16"),
            (
                lambda c: c["model"]["decoder"]["session_options"].update(custom_ops_library="/opt/lib.so"),
                "custom_ops_library: /opt/lib.so",
            ),
            (lambda c: c["model"].update(surprise=1), "surprise"),
            (lambda c: c["model"].update(context_length=20_000), "context_length to at most 16384"),
            (lambda c: c["model"].update(context_length=3), "raise model.context_length"),
            (lambda c: c["model"].pop("context_length"), "set model.context_length"),
            (lambda c: c["model"].pop("type"), 'set model.type to "llama"'),
            (lambda c: c["model"].update(type="phi9"), "Unsupported model_type in config.json: phi9"),
            (lambda c: c["engine"]["dynamic_batching"].update(num_blocks=3), "too small for an ordinary prompt"),
            (lambda c: c["engine"]["dynamic_batching"].update(num_blocks=10**9), "of memory are free"),
            (lambda c: c["engine"]["dynamic_batching"].update(surprise=1), "correct that line"),
            (lambda c: c["model"]["decoder"].update(filename="modle.onnx"), "correct model.decoder.filename"),
            (lambda c: c["model"]["decoder"].update(filename="x" * 300), "correct model.decoder.filename"),
        ],
    )
    def test_configuration(self, run: Run, folder: Path, change: Callable[[dict], object], words: str) -> None:
        self.edit(folder, change)
        done = run("doctor", folder)
        assert done.returncode == 1 and words in " ".join(done.stdout.split()), done.stdout

    def test_truncated_weights(self, run: Run, folder: Path) -> None:
        data = folder / "model.onnx.data"
        data.write_bytes(data.read_bytes()[:-5000])
        done = run("doctor", folder)
        assert done.returncode == 1 and "copy it again" in done.stdout
        done = run("generate", folder, "--raw", "--prompt", "x")
        assert "octavo doctor" in sentence(done)

    def test_weights_whose_name_no_file_has(self, run: Run, folder: Path) -> None:
        path = folder / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "y" * 300
        path.write_bytes(model.SerializeToString())
        done = run("doctor", folder)
        assert done.returncode == 1 and "y cannot be read: " in " ".join(done.stdout.split())

    def test_damaged_graph(self, run: Run, folder: Path) -> None:
        graph = folder / "model.onnx"
        graph.write_bytes(graph.read_bytes()[:3000])
        assert run("doctor", folder).returncode == 1
        assert "octavo doctor" in sentence(run("generate", folder, "--raw", "--prompt", "x"))

    def test_another_models_tokenizer(self, run: Run, folder: Path) -> None:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["model"]["vocab"]["more"] = 288
        path.write_text(json.dumps(tokenizer))
        done = run("doctor", folder)
        assert done.returncode == 1 and "another model" in done.stdout
        path.write_text('{"version": "1.0"}')
        assert "tokenizer.json has no model.vocab." in run("doctor", folder).stdout

    def test_a_misspelt_attribute(self, run: Run, folder: Path) -> None:
        path = folder / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            if node.op_type == "PagedAttention":
                node.attribute.append(onnx.helper.make_attribute("local_windows_size", 4))
        path.write_bytes(model.SerializeToString())
        done = run("doctor", folder)
        assert done.returncode == 1 and "rename it local_window_size" in " ".join(done.stdout.split())

    def test_an_attribute_that_is_not_utf8(self, run: Run, folder: Path) -> None:
        path = folder / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        node = next(node for node in model.graph.node if node.op_type == "PagedAttention")
        node.attribute.append(onnx.helper.make_attribute("zebra", 4))
        path.write_bytes(model.SerializeToString().replace(b"zebra", b"zebr\xff"))
        done = run("doctor", folder)
        assert done.returncode == 1 and r"zebr\xff in" in " ".join(done.stdout.split()), done.stdout

    def test_a_mistake_in_the_configuration_names_its_line(self, run: Run, folder: Path) -> None:
        path = folder / "genai_config.json"
        path.write_text(path.read_text().replace('"type"', "type", 1))
        done = run("doctor", folder)
        assert done.returncode == 1 and "fix line 3" in " ".join(done.stdout.split())
        assert "octavo convert" not in done.stdout

    def test_long_paths_are_folded(self, run: Run, tmp_path: Path) -> None:
        long = "x" * 200
        done = run("doctor", tmp_path / long, env={**os.environ, "COLUMNS": "80"})
        assert done.stdout.count("x") >= 200 and "…" not in done.stdout

    @pytest.mark.parametrize(
        ("program", "words"),
        [
            ("import os; os.abort()", "ended by SIGABRT"),
            ("import time; time.sleep(60)", "no answer within 1 seconds"),
            ("import sys; sys.exit(3)", "code 3"),
            ("print('noise')\nprint('octavo-trial:\"why.\"')", "why."),
            ("print('octavo-trial:\"\"')", ""),
        ],
    )
    def test_an_engine_that_kills_its_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
    ) -> None:
        """A stand-in for Python plays the runtime that dies."""
        stand_in = tmp_path / "python"
        stand_in.write_text(f"#!{sys.executable}\n{program}\n")
        stand_in.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(stand_in))
        why = octavo.trial.try_engine(tmp_path, timeout=1)
        assert words in why and bool(words) == bool(why)


class TestExplain:
    def test_names_nodes_features_and_backends(self, run: Run, library: None, model_dir: Path) -> None:
        pytest.importorskip("octavo._core")
        done = run("explain", model_dir / "model.onnx")
        assert done.returncode == 0, done.stderr
        assert "2 nodes alike, blk.0.attn.out to blk.1.attn.out" in done.stdout
        assert "packed_qkv" in done.stdout and "rope" in done.stdout and "backend     cpu" in done.stdout

    def test_a_refused_node_is_a_failure(self, run: Run, model_dir: Path, tmp_path: Path) -> None:
        """Risk: a script that asks before it deploys hears 0. The report comes all the same, and is JSON if asked."""
        pytest.importorskip("octavo._core")
        model = onnx.load(model_dir / "model.onnx", load_external_data=False)
        for node in model.graph.node:
            if node.op_type == "PagedAttention":
                node.attribute.append(onnx.helper.make_attribute("softcap", -1.0))
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        for options in ((), ("--json",)):
            done = run("explain", "m.onnx", *options)
            line = sentence(done)
            assert "blk.0.attn.out: softcap" in line and "(2 nodes alike)" in line
            assert json.loads(done.stdout)["nodes"] if options else "refused     softcap" in done.stdout

    def test_sizes(self, run: Run, model_dir: Path) -> None:
        """A folder for its graph; 2 layers of 2 KV heads of 16 channels in float32: 512 bytes a token."""
        pytest.importorskip("octavo._core")
        done = run("explain", model_dir, "--context", 40, "--batch", 3, "--json")
        sizes = json.loads(done.stdout)["sizes"]
        step = sizes.pop("decode_step")
        weights = sizes.pop("weights_bytes")
        assert sizes == {"cache_bytes_per_token": 512, "context": 40, "cache_bytes_per_sequence": 48 * 512}
        read = step.pop("weights_bytes_read")
        assert step == {"batch": 3, "cache_bytes_read": 3 * 40 * 512, "cache_bytes_written": 3 * 512}
        # All but the two RoPE tables of 16,384 rows and a few small constants; the tied head is stored and read once.
        assert 0 <= weights - read - 2 * 16384 * 8 * 4 < 200
        assert "24.0 KiB a sequence of 40 tokens" in run("explain", model_dir, "--context", 40).stdout


class TestJson:
    """Every command that prints a result has --json, and then prints nothing else on standard output."""

    def test_every_command_has_it(self) -> None:
        for name, command in octavo.cli.cli.commands.items():
            has = any("--json" in parameter.opts for parameter in command.params)
            assert has or name == "completion"

    def test_convert(self, run: Run, tmp_path: Path) -> None:
        write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape())
        content = json.loads(run("convert", "tiny.gguf", "out", "--json").stdout)
        assert content.pop("bytes") == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
        assert content == {
            "folder": "out",
            "architecture": "llama",
            "weights": "int4",
            "kv_cache": "float16",
            "context_length": 128,
            "block_size": 16,
            "num_blocks": 32,
        }

    def test_generate(self, run: Run, library: None, model_dir: Path) -> None:
        arguments = ("generate", model_dir, "--raw", "--max-tokens", 4, "--prompt", "x" * 50_000, "--prompt", "the")
        done = run(*arguments, "--json")
        content = json.loads(done.stdout)
        assert done.returncode == 1 and content["generated_tokens"] == 4
        refused, answer = content["answers"]
        assert refused["state"] == "refused" and "num_blocks" in refused["problem"]
        assert (answer["prompt"], answer["state"], answer["generated_tokens"]) == ("the", "done", 4)
        assert answer["text"] == run(*arguments[:-4], *arguments[-2:]).stdout.rstrip("\n")

    def test_doctor(self, run: Run, library: None, model_dir: Path, tmp_path: Path) -> None:
        content = json.loads(run("doctor", model_dir, "--json").stdout)
        assert content["problems"] == 0 and content["findings"][-1]["check"] == "engine"
        done = run("doctor", tmp_path, "--json")
        assert done.returncode == 1 and json.loads(done.stdout)["problems"] == 1

    def test_explain(self, run: Run, model_dir: Path) -> None:
        pytest.importorskip("octavo._core")
        (node,) = json.loads(run("explain", model_dir, "--json").stdout)["nodes"]
        assert node["names"] == ["blk.0.attn.out", "blk.1.attn.out"] and node["backend"].startswith("cpu")
        assert node["features"] == ["packed_qkv", "rope"] and len(node["backends"]) >= 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is not enough memory."),
        (PermissionError(13, "Permission denied", "/models/m"), "/models/m cannot be read or written: Permission d"),
        (OSError(28, "No space left on device"), "the output cannot be written: No space left on device."),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Risk: a file that cannot be read is reported as output that cannot be written."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("octavo.explain.describe", fail)
    assert octavo.cli.main(["explain", "m"]) == 1
    assert capsys.readouterr().err.startswith(f"octavo: {words}")


def test_names_that_the_system_does_not_take(run: Run) -> None:
    long = "x" * 300
    for arguments in (["generate", long, "--prompt", "x"], ["explain", long], ["perplexity", long]):
        assert sentence(run(*arguments)) == f"octavo: {long} cannot be read: File name too long."
    assert "cannot be read: File name too long" in "".join(run("doctor", long).stdout.replace("│", "").split("\n"))


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(OctavoError, match="which JSON cannot hold"):
            octavo.console.print_json({"rows": [value]})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a":' * 100_000, "is nested too deeply to be read."),
        (b'{"a": ' + b"1" * 5000 + b"}", "holds a number of thousands of digits."),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)."),
        (b"[1]", "must hold a JSON object."),
    ],
)
def test_odd_json(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "genai_config.json").write_bytes(content)
    with pytest.raises(OctavoError) as error:
        read_json(tmp_path / "genai_config.json")
    assert str(error.value) == f"{tmp_path / 'genai_config.json'} {words}"


def test_a_redirected_stderr_gets_no_empty_line(run: Run, model_dir: Path) -> None:
    """What a progress bar leaves behind on a terminal is noise in a file."""
    done = run("doctor", model_dir)
    assert done.stderr == "", done.stderr
