"""Format the C++ files with clang-format, or check them with --check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src", "ort", "python", "tests", "bench", "examples", "tools")
# The version of the dev requirements: other versions format differently.
CLANG_FORMAT = ROOT / ".venv/bin/clang-format"


def cpp_files() -> list[str]:
    """Every C++ file of the repository, relative to its root."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in {".h", ".cc", ".cuh", ".cu", ".inc"})


def main() -> int:
    mode = ["--dry-run", "-Werror"] if "--check" in sys.argv[1:] else ["-i"]
    return subprocess.run([str(CLANG_FORMAT), *mode, *cpp_files()], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
