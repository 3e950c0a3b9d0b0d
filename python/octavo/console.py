"""What the `octavo` command prints beside plain lines: JSON, tables, progress, and how to call it again.

rich is imported where it is used: --help stays quick.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import OctavoError, as_argument, counted

if TYPE_CHECKING:
    from .doctor import Finding
    from .perplexity import Report


QUIET_PERCENT = 3  # of the processors' time that others may take before a benchmark's figures are doubtful


def print_json(content: Any) -> None:
    """Raises OctavoError for NaN and infinity, which JSON does not have; Python would write them all the same."""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        raise OctavoError("the result holds NaN or infinite numbers, which JSON cannot hold.") from error
    click.echo(text)


def output_failed(error: OSError) -> str:
    """A sentence on what stopped a command's printing."""
    if isinstance(error.filename, (str, bytes)):  # the streams have none
        return f"{os.fsdecode(error.filename)} cannot be read or written: {error.strerror or error}."
    return f"the output cannot be written: {error.strerror or error}."


def print_findings(findings: list[Finding]) -> None:
    from rich.table import Column

    rows = (
        (finding.check, "[green]ok[/]" if finding.ok else "[bold red]problem[/]", finding.rich_text())
        for finding in findings
    )
    _print_table(["check", "result", Column("what was found, what to do", overflow="fold")], rows)
    problems = sum(not finding.ok for finding in findings)
    click.echo("No problems found." if not problems else f"{problems} of {len(findings)} checks found a problem.")


def print_perplexity(report: Report, threads: int) -> None:
    reference = report.rows[0].perplexity
    rows = (
        (
            row.cache_type,
            row.scales,
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / reference - 1):+.2f} %",
            f"{row.kl:.5f}",
            f"{row.bytes_per_token:,}",
            f"{row.prefill_tokens_per_second:.0f}",
            f"{row.decode_tokens_per_second:.1f}",
        )
        for row in report.rows
    )
    heads = ("perplexity", "change", "KL, nats", "bytes/token", "prefill tok/s", "decode tok/s")
    _print_table(["cache", "scales", *_numbers(heads)], rows)
    click.echo(f"{counted(report.scored, 'token')} predicted, in contexts of at most {report.window:,}.")
    _print_others(report.others_percent or 0.0, threads, "speeds")


def print_bench(report: dict[str, Any]) -> None:
    """report: of bench.run."""
    from .bench import DISTINCT_BYTES
    from .sizes import shown_bytes

    small = [row["ring_bytes"] for row in report["rows"] if row["ring_bytes"] < DISTINCT_BYTES]
    rows = (
        (
            row["work"] + (" *" if row["ring_bytes"] < DISTINCT_BYTES else ""),
            f"{row['floor_us']:,.0f} us",
            f"{bar:,.0f} us" if (bar := row["bar_us"]) else "no kernel",
            f"{row['ours_us']:,.0f} us",
            f"{row['ours_us'] / bar:.2f}" if bar else "",
            f"{row['percent_of_limit']:.0f} %",
        )
        for row in report["rows"]
    )
    _print_table(["work", *_numbers(("floor", "stock", "octavo", "of stock", "of floor"), no_wrap=True)], rows)
    stock = ", ".join(f"{name} of {about['version']}" for name, about in report["about_peers"].items())
    click.echo(f"{report['device']}, {counted(report['threads'], 'thread')}; {report['version']}, {stock}.")
    _print_others(max((row["others_percent"] or 0.0 for row in report["rows"]), default=0.0), report["threads"])
    if small:
        click.echo(f"* goes round caches of {shown_bytes(min(small))} or more only, which a processor cache may hold.")
    for refusal in dict.fromkeys(text for row in report["rows"] for text in row["peer_refusals"].values()):
        click.echo(f"no kernel: {refusal}")


def _print_others(percent: float, threads: int, figures: str = "figures") -> None:
    if percent > QUIET_PERCENT:
        click.echo(
            f"Other processes took up to {percent:.0f} % of the processors meanwhile: the {figures} are no measure of "
            f"this machine. Stop them{', or give --threads 1' if threads != 1 else ''}."
        )


def _numbers(heads: Iterable[str], **options: Any) -> list[Any]:
    from rich.table import Column

    return [Column(head, justify="right", **options) for head in heads]


def _print_table(columns: list[Any], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress_bar(first_step: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs, moved by the function that it gives: (step, done, total).

    Where stderr is no terminal nothing is written; rich would end with an empty line there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(first_step, total=None, count="")

        def progress(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total, count=f"{done:,}/{total:,}")

        yield progress


def next_line(model_dir: Path) -> str:
    return f'Next: {_own_command()} generate {as_argument(model_dir)} --prompt "Write a haiku about the sea."'


def _own_command() -> str:
    """How to call octavo from this shell, in the current folder, whether or not it is on the PATH."""
    called = Path(sys.argv[0])
    with suppress(OSError):  # the current folder has been deleted
        called = called.absolute()
    if called.name != "octavo" or not called.is_file():
        return f"{shlex.quote(_short(Path(sys.executable)))} -m octavo"
    on_path = shutil.which("octavo")
    if on_path is not None and os.path.samefile(on_path, called):
        return "octavo"
    return shlex.quote(_short(called))


def _short(path: Path) -> str:
    """Relative to the current folder, for a path inside it. Links are kept: a virtual environment is made of them."""
    try:
        relative = path.relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere; the current folder has been deleted
        return str(path)
    return str(relative) if len(relative.parts) > 1 else f"./{relative}"
