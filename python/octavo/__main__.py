"""The `octavo` command, also as `python -m octavo`. Loads next to nothing before Ctrl-C is taken care of."""

from __future__ import annotations

import sys

from .interrupts import EXIT_INTERRUPTED, spare_imports


def main() -> int:
    """Entry point. Returns the exit code; see cli.main."""
    spare_imports()
    try:
        from . import cli
    except KeyboardInterrupt:
        sys.stderr.write("octavo: interrupted.\n")
        return EXIT_INTERRUPTED
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
