"""The `octavo` command: all commands together, and the ends that they come to."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

import click

from . import __version__, cli_models, cli_reports
from .cli_options import EXIT_FAILURE
from .console import output_failed
from .errors import OctavoError
from .interrupts import EXIT_INTERRUPTED


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


for _command in (
    cli_models.convert,
    cli_models.generate,
    cli_models.demo,
    cli_reports.doctor,
    cli_reports.explain,
    cli_reports.perplexity,
    cli_reports.bench,
):
    cli.add_command(_command)


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


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 1 = failed (one sentence on stderr), 2 = wrong usage, 130 = Ctrl-C."""
    if sys.stdout is None:  # closed by the shell; a file opened later would get its number, and what libraries print
        click.echo("octavo: standard output is closed; direct it to a file, or to /dev/null.", err=True)
        return EXIT_FAILURE
    if sys.stderr is None:  # closed by the shell; libraries print without asking
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character gets its code
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here rather than at exit, where a full disk could not be reported
    except OSError as error:
        click.echo(f"octavo: {output_failed(error)}", err=True)
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
