"""Commands that report: on a model's folder, on a graph, on cache types, on this processor.

Modules with heavy imports (onnx, onnxruntime, rich) are imported by the commands that use them: --help stays quick.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from .cli_input import read_text
from .cli_options import (
    BENCH_CACHES,
    EXIT_FAILURE,
    GENAI_CACHES,
    INT32_MAX,
    MIXED_CACHE,
    PATH,
    FiniteRange,
    json_option,
    kv_cache_option,
)
from .console import print_bench, print_findings, print_json, print_perplexity, progress_bar


@click.command(
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


@click.command(
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
    _fail_for(report.refusals)


@click.command(
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

    content = None if text is None else read_text(text)
    with progress_bar("reading") as progress:
        report = measure(model_dir, content, progress=progress, **options)
    if as_json:
        print_json(report.as_json())
    else:
        print_perplexity(report, options["threads"])
    _fail_for([f"{name} was not measured: {reason}" for name, reason in report.failed.items()])


@click.command(
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


def _fail_for(reasons: list[str]) -> None:
    """Ends the command after its report, where there are reasons to."""
    for reason in reasons:
        click.echo(f"octavo: {reason}", err=True)
    if reasons:
        sys.exit(EXIT_FAILURE)
