"""Commands that write, and the command line itself, as users meet them.

Risks: tracebacks, wrong exit codes, text lost on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cli_support import SECONDS, Run, command, sentence
from models_support import TinyShape, write_tiny_gguf

import octavo.cli
import octavo.console
import octavo.runtime
import octavo.trial
from octavo import __version__


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


@pytest.mark.parametrize(
    "arguments", [("doctor", "nowhere"), ("bench", "--context", "64", "--batch", "1")], ids=lambda a: a[0]
)
def test_ctrl_c_while_libraries_load(interruptible: None, arguments: tuple[str, ...]) -> None:
    """Risk: inside the initialisation of an extension module it is an ImportError, a crash, or nothing."""
    started = time.monotonic()
    subprocess.run(command(*arguments), capture_output=True, timeout=SECONDS, check=False)
    longest = min(1.0, time.monotonic() - started)
    for step in range(8):
        with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            time.sleep(0.08 + longest * step / 8)  # Python itself takes some 0.05 s, in which nobody can help
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        # Where it came after the command's end, Python may end by it; doctor finds nothing at "nowhere".
        finished = {"doctor": (0, 1, -signal.SIGINT), "bench": (0, -signal.SIGINT)}[arguments[0]]
        expected = b"octavo: interrupted." if process.returncode == 130 else b""
        assert process.returncode == 130 or process.returncode in finished, (step, process.returncode, errors)
        assert errors.strip() == expected, (step, errors)


def test_an_interrupt_waits_for_the_end_of_an_import(interruptible: None, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "for _ in range(9): time.sleep(0.01)\n"
        "done = True\n"
    )
    program = (
        "import sys, time\nfrom octavo.interrupts import spare_imports\nspare_imports()\n"
        "try:\n    import slow\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print(sys.modules['slow'].done)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_second_ctrl_c_is_no_traceback(interruptible: None) -> None:
    """Risk: it comes while "interrupted" is printed, or while Python ends."""
    program = (
        "import os, signal, sys, click, octavo.cli\n"
        "def interrupt(*_, **__): os.kill(os.getpid(), signal.SIGINT)\n"
        "def echo(text, err): interrupt(); print(text, file=sys.stderr)\n"
        "octavo.cli.cli.main, click.echo = interrupt, echo\n"
        "code = octavo.cli.main([])\n"
        "interrupt()\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (130, "octavo: interrupted.\n")


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


@pytest.mark.parametrize("arguments", [(), ("--prompt", "he"), ("--json",)])
def test_a_long_prompt_shows_that_it_is_read(library: None, model_dir: Path, arguments: tuple[str, ...]) -> None:
    """On a terminal's stderr, gone before the answer. A step reads 2,048 tokens, all of a short prompt among them."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    prompt = ("generate", model_dir, "--raw", "--max-tokens", 2, "--prompt", "the " * 3000)
    with subprocess.Popen(
        command(*prompt, *arguments), stdout=subprocess.PIPE, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # how a terminal ends
            while data := os.read(master, 65536):
                shown += data
        assert process.wait(SECONDS) == 0
        assert process.stdout is not None and b"reading" not in process.stdout.read()
    os.close(master)
    assert b"reading the prompt" in shown
    last = b"answering" if arguments else b" 2,048/3,00"  # a bar draws what it was told last when it ends
    assert last in shown


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


def test_a_folder_like_an_option_is_pasted_as_a_folder() -> None:
    """Risk: `octavo generate -m` asks for an option."""
    assert " generate ./-m --prompt" in octavo.console.next_line(Path("-m"))
    assert " generate './-my model' --prompt" in octavo.console.next_line(Path("-my model"))
    assert " generate /tmp/-m --prompt" in octavo.console.next_line(Path("/tmp/-m"))


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


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [
        (
            ["--context-length", "63"],
            ["a context of 63 tokens is too short for an ordinary prompt (--context-length)."],
        ),
        (["--num-blocks", "3"], ["a cache of 48 tokens is too small for an ordinary prompt (--num-blocks)."]),
        (
            ["--num-blocks", "2147483647", "--json"],
            ["the cache takes 8.0 TiB, and 1.0 GiB of memory are free here; give --num-blocks 196608 or fewer."],
        ),
        (["--context-length", "64", "--num-blocks", "4"], []),
    ],
)
def test_what_is_hardly_usable_is_warned_of(
    arguments: list[str],
    warnings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Risk: a conversion of hours is found useless when its model is loaded. A block has 4 KiB."""
    monkeypatch.setattr("octavo.convert.available_bytes", lambda: 1 << 30)
    write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape())
    assert octavo.cli.main(["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out"), *arguments]) == 0
    assert capsys.readouterr().err == "".join(f"octavo: warning: {warning}\n" for warning in warnings)


def test_a_context_without_room_for_an_answer_is_refused(run: Run, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape())
    done = run("convert", "tiny.gguf", "out", "--context-length", 1)
    assert sentence(done) == "octavo: --context-length 1 leaves no room for an answer; give 2 or more."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["generate", "m", "-"], ["generate", "m", "--prompts-file", "-"]])
def test_closed_standard_input(run: Run, arguments: list[str]) -> None:
    done = run(*arguments, preexec_fn=lambda: os.close(0))
    assert sentence(done) == "octavo: standard input is closed; give it a text, or name a file."


def test_closed_standard_input_of_perplexity(run: Run, model_dir: Path) -> None:
    done = run("perplexity", model_dir, "-", preexec_fn=lambda: os.close(0))
    assert sentence(done) == "octavo: standard input is closed; give it a text, or name a file."


CLOSED = "octavo: standard output is closed; direct it to a file, or to /dev/null."


@pytest.mark.parametrize("arguments", [["--help"], *([name, "m", "n"] for name in octavo.cli.cli.commands)])
def test_closed_standard_output(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Risk: a report that nobody can read looks like a success."""
    monkeypatch.setattr(sys, "stdout", None)
    assert octavo.cli.main(arguments) == 1
    assert capsys.readouterr().err == CLOSED + "\n"


def test_standard_output_closed_by_the_shell(run: Run, model_dir: Path) -> None:
    assert sentence(run("doctor", model_dir, preexec_fn=lambda: os.close(1))) == CLOSED


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


def test_more_threads_than_processors_are_refused(run: Run, model_dir: Path) -> None:
    done = run("generate", model_dir, "--prompt", "x", "--threads", 1024)
    assert done.returncode == 1 and "give --threads" in done.stderr and "Traceback" not in done.stderr
