"""The octavo command as its users meet it. Risks: tracebacks, wrong exit codes, text lost on Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from models_support import TinyShape, require_library, write_tiny_gguf

import octavo.cli
import octavo.console
import octavo.runtime
import octavo.trial
from octavo import __version__
from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.graph import GraphOptions
from octavo.model_folder import read_json

SECONDS = 120  # for a command, on a machine that is busy with other things

Run = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "octavo", *map(str, arguments)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs octavo in an empty folder; no traceback is ever right."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(  # type: ignore[call-overload]
            command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, **options
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_gguf(folder / "tiny.gguf", TinyShape(context=16384))
    convert(folder / "tiny.gguf", folder / "model", GraphOptions(weight_form="float32"), num_blocks=3100)
    return folder / "model"


@pytest.fixture
def library() -> None:
    require_library()


def sentence(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The one line on stderr of a failed command."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("octavo: ") and lines[0].endswith("."), done.stderr
    return lines[0]


def test_help_teaches_and_version_tells(run: Run) -> None:
    assert run("--version").stdout.split()[-1] == __version__
    top = run("--help").stdout
    assert "octavo convert" in top
    for name in octavo.cli.cli.commands:
        assert name in top
        page = run(name, "--help")
        assert page.returncode == 0 and "Usage: octavo" in page.stdout
        assert "Examples:" in page.stdout or name == "demo"


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["convert", "only-one"],
        ["convert", "a", "b", "--weights", "int3"],
        ["convert", "a", "b", "--block-size", "24"],
        ["convert", "a", "b", "--weights", "float32", "--exact"],
        ["generate", "m"],
        ["generate", "m", "--prompt", "x", "--top-k", "3"],
        ["generate", "m", "--prompt", "x", "--max-tokens", "0"],
        ["generate", "m", "stray"],
    ],
)
def test_wrong_usage_exits_with_2(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and "Usage:" in done.stderr and "Error:" in done.stderr


def test_bad_files_get_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04")
    assert "not a GGUF file" in sentence(run("convert", "zip.gguf", "out"))
    assert "No such file" in sentence(run("convert", "absent.gguf", "out"))
    assert "does not exist; check the path" in sentence(run("generate", "absent", "--prompt", "x"))
    assert "is a file" in sentence(run("generate", "zip.gguf", "--prompt", "x"))
    assert "not an ONNX file" in sentence(run("explain", "zip.gguf"))
    assert "cannot be read" in sentence(run("generate", "m", "--prompts-file", "absent.txt"))
    assert not (tmp_path / "out").exists()


def test_a_half_written_folder_is_no_model(run: Run, model_dir: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    for name in ("model.onnx", "tokenizer.json", "tokenizer_config.json"):
        (half / name).symlink_to(model_dir / name)
    assert "genai_config.json missing" in sentence(run("generate", half, "--prompt", "x"))
    done = run("doctor", half)
    assert done.returncode == 1 and "problem" in done.stdout


def test_convert_then_generate(run: Run, library: None, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape(), "Q4_1")
    done = run("convert", "tiny.gguf", "out")
    assert done.returncode == 0, done.stderr
    assert f"Next: {sys.executable} -m octavo generate out --prompt " in done.stdout
    assert "--force" in sentence(run("convert", "tiny.gguf", "out"))
    done = run("generate", "out", "--prompt", "the", "--raw", "--max-tokens", "8")
    assert done.returncode == 0 and "8 tokens in" in done.stderr and "tokens/s" in done.stderr


def test_prompts_from_everywhere(run: Run, library: None, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the first\n\n  he second \n", encoding="utf-8")
    arguments = (
        "generate",
        model_dir,
        "--raw",
        "--max-tokens",
        "3",
        "--prompt",
        "one",
        "--prompts-file",
        "prompts.txt",
    )
    done = run(*arguments, "-", input="from a pipe\n")
    assert done.returncode == 0, done.stderr
    titles = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    assert titles == ["[1] one", "[2] the first", "[3] he second", "[4] from a pipe"]
    assert "4 prompts" in done.stderr and "4 answers stopped at --max-tokens" in done.stderr
    assert "[stopped" not in done.stdout  # which is for other programs


def test_a_prompt_that_does_not_fit_fails_alone(run: Run, library: None, model_dir: Path) -> None:
    done = run("generate", model_dir, "--raw", "--max-tokens", "4", "--prompt", "x" * 20_000, "--prompt", "the")
    assert done.returncode == 1
    assert "prompt 1: the prompt has 20,000 tokens" in done.stderr and "num_blocks" in done.stderr
    assert done.stdout.startswith("[2] the\n")


def test_without_the_library(run: Run, model_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, octavo.runtime.LIBRARY_VARIABLE: str(tmp_path / "absent.so")}
    arguments = ("generate", model_dir, "--prompt", "x")
    assert "absent.so" in sentence(run(*arguments, env=environment))
    assert run("doctor", model_dir, env=environment).returncode == 1
    (tmp_path / "absent.so").write_text("not a library")
    assert "cannot be loaded" in sentence(run(*arguments, env=environment))


def test_a_chat_template_is_used_or_asked_for(run: Run, library: None, model_dir: Path) -> None:
    """The tiny model has none."""
    done = run("generate", model_dir, "--prompt", "x")
    assert done.returncode == 1 and "--raw" in done.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Programs started in the test heed SIGINT. A shell that starts tests in the background has them ignore it, and
    what they start inherits that."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def interrupt_when(process: subprocess.Popen[bytes], descriptor: int, enough: int) -> bytes:
    """Reads until `enough` bytes have come, sends SIGINT, and reads the rest."""
    output, end, sent = b"", time.monotonic() + SECONDS, False
    while time.monotonic() < end:
        if select.select([descriptor], [], [], 0.5)[0]:
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # a terminal whose process has ended
                break
            if not data:
                break
            output += data
        if len(output) >= enough and not sent:
            process.send_signal(signal.SIGINT)
            sent = True
    assert sent, output
    return output


def test_ctrl_c_keeps_the_text_of_one_prompt(library: None, interruptible: None, model_dir: Path) -> None:
    arguments = command("generate", model_dir, "--raw", "--max-tokens", 16000, "--prompt", "the")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        output = interrupt_when(process, process.stdout.fileno(), 20)
        errors = process.stderr.read().decode()
        assert process.wait(SECONDS) == 130
    assert len(output) >= 20 and output.endswith(b"\n")
    assert "Traceback" not in errors and "interrupted" in errors and "tokens/s" in errors


def test_ctrl_c_keeps_the_texts_of_several_prompts(library: None, interruptible: None, model_dir: Path) -> None:
    """In a pipe, answers are written whole when they end: the first ends at once, the rest when interrupted."""
    prompts = [item for text in ("the", "he", "x") for item in ("--prompt", text)]
    arguments = command("generate", model_dir, "--raw", "--max-tokens", 16000, *prompts)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
    if process.returncode == 0:
        pytest.skip("this machine generated 48,000 tokens within 5 seconds")
    assert process.returncode == 130 and b"Traceback" not in errors
    assert all(f"[{number}] ".encode() in output for number in (1, 2, 3))


def test_a_terminal_shows_answers_live(library: None, model_dir: Path) -> None:
    """On a terminal of 80 columns: a live area while they grow, whole texts at the end."""
    master, slave = pty.openpty()
    prompts = [item for text in ("the", "he", "x") for item in ("--prompt", text)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    arguments = command("generate", model_dir, "--raw", "--max-tokens", 40, *prompts)
    with subprocess.Popen(arguments, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                break
            if not data:
                break
            output += data
        assert process.wait(SECONDS) == 0
    os.close(master)
    assert all(f"[{number}] ".encode() in output for number in (1, 2, 3))
    assert output.count(b"[stopped at --max-tokens]") == 3


def test_a_full_disk_is_one_sentence(run: Run, library: None, model_dir: Path) -> None:
    """/dev/full takes nothing; what is left in Python's buffer must not fail once more at exit."""
    generate = ("generate", model_dir, "--raw", "--max-tokens", 4, "--prompt", "the")
    commands: list[tuple[object, ...]] = [
        generate,
        (*generate, "--prompt", "he"),
        ("explain", model_dir / "model.onnx"),
    ]
    for arguments in [*commands, ("doctor", model_dir)]:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False
            )
        assert done.returncode == 1, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last == "octavo: the output cannot be written: No space left on device."
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_next_lines_work_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """octavo is often not on the PATH: make demo runs .venv/bin/octavo."""
    program = tmp_path / ".venv/bin/octavo"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [".venv/bin/octavo", "demo"])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert octavo.console.next_line(Path("my models/m")).startswith(
        "Next: .venv/bin/octavo generate 'my models/m' --prompt"
    )
    monkeypatch.setenv("PATH", str(program.parent))
    assert octavo.console.next_line(Path("m")).startswith("Next: octavo generate m ")
    monkeypatch.chdir(program.parent)
    monkeypatch.setattr(sys, "argv", ["./octavo"])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert octavo.console.next_line(Path("m")).startswith("Next: ./octavo generate m ")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert octavo.console.next_line(Path("m")).startswith(f"Next: {program} generate m ")


def test_the_next_line_where_the_current_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for program in ("octavo", str(tmp_path / "octavo")):
        monkeypatch.setattr(sys, "argv", [program])
        line = octavo.console.next_line(Path("m"))
        assert line.startswith(f"Next: {sys.executable} -m octavo generate m ")


def test_a_closed_pipe_is_no_traceback(library: None, model_dir: Path) -> None:
    arguments = command("generate", model_dir, "--raw", "--max-tokens", 16000, "--prompt", "the")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(SECONDS) != 0
    assert b"Traceback" not in errors and b"octavo: the output cannot be written: Broken pipe." in errors


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
        assert done.returncode == 1 and "y is missing or cannot be read" in " ".join(done.stdout.split())

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
            "kv_cache": "float32",
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


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_the_script_asks_octavo(self, run: Run, shell: str) -> None:
        done = run("completion", shell)
        assert done.returncode == 0 and f"_OCTAVO_COMPLETE={shell}_complete" in done.stdout

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("octavo ", ["convert", "generate", "doctor", "explain", "bench"]),
            ("octavo convert --kv-cache i", ["int8", "int4"]),
            ("octavo explain --j", ["--json"]),
        ],
    )
    def test_words(self, run: Run, line: str, words: list[str]) -> None:
        given = line.split(" ")
        environment = {"_OCTAVO_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(given) - 1)}
        done = run(env=os.environ | environment)
        found = [row.split(",", 1)[1] for row in done.stdout.splitlines()]
        assert set(words) <= set(found), done.stdout


@pytest.mark.parametrize("arguments", [["convert", "a", "b", "--num-blocks"], ["demo", "--max-tokens"]])
def test_numbers_beyond_int32(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Risk: a folder is written that onnxruntime-genai, which reads an int32, cannot load."""
    assert octavo.cli.main([*arguments, str(2**31)]) == 2
    assert f"{arguments[-1]}': 2147483648 is not in the range 1<=x<=2147483647" in capsys.readouterr().err


def test_numbers_up_to_int32_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape())
    arguments = ["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out"), "--num-blocks", str(2**31 - 1)]
    assert octavo.cli.main(arguments) == 0
    content = json.loads((tmp_path / "out/genai_config.json").read_text())
    assert content["engine"]["dynamic_batching"]["num_blocks"] == 2**31 - 1


@pytest.mark.parametrize("arguments", [["generate", "m", "-"], ["generate", "m", "--prompts-file", "-"]])
def test_closed_standard_input(run: Run, arguments: list[str]) -> None:
    done = run(*arguments, preexec_fn=lambda: os.close(0))
    assert sentence(done) == "octavo: standard input is closed; give it a text, or name a file."


def test_closed_standard_input_of_perplexity(run: Run, model_dir: Path) -> None:
    done = run("perplexity", model_dir, "-", preexec_fn=lambda: os.close(0))
    assert sentence(done) == "octavo: standard input is closed; give it a text, or name a file."


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-tokens", "100000000000000000000"], "--max-tokens"),
        (["--top-k", "99999999999", "--temperature", "1"], "--top-k"),
        (["--seed", "99999999999999999999", "--temperature", "1"], "--seed"),
        (["--threads", "3000000000"], "--threads"),
        (["--temperature", "nan"], "'nan' is not a number"),
    ],
)
def test_numbers_out_of_range(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Risk: a number reaches the engine's bindings, which answer with a C++ signature or by hanging."""
    assert octavo.cli.main(["generate", "nowhere", "--prompt", "hi", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    """Risk: bytes out of the shell that are no text reach the tokenizer."""
    assert octavo.cli.main(["generate", "nowhere", "--prompt", "\udcff"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err
