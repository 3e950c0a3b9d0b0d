"""Run clang-tidy (.clang-tidy) over the library's own C++ sources, with the compile commands of a build.

Usage: run_clang_tidy.py [--build build/dev] [FOLDER_OR_FILE ...]     (src and ort where none is named)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2
# The compile commands are GCC's; clang does not know all of its warning options, nor every use of a target attribute.
EXTRA_ARGUMENTS = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-pragma-clang-attribute"]


def sources(build: Path, folders: list[str]) -> list[Path]:
    """The compiled C++ files of `folders`. Each is checked once, however often it is compiled."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    files = {Path(command["file"]) for command in commands if command["file"].endswith(".cc")}
    return sorted(path for path in files if any(path.is_relative_to(ROOT / folder) for folder in folders))


def check(build: Path, path: Path) -> tuple[Path, int, str]:
    """Returns the file, clang-tidy's exit status and its findings."""
    command = ["clang-tidy", "--quiet", "-p", str(build), *EXTRA_ARGUMENTS, str(path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return path, completed.returncode, completed.stdout + (completed.stderr if completed.returncode else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/dev")
    parser.add_argument("folders", nargs="*", default=["src", "ort"], metavar="FOLDER_OR_FILE")
    options = parser.parse_args()
    files = sources(options.build, options.folders)
    if not files:
        print(f"no compile command for {', '.join(options.folders)} in {options.build}; build that preset first")
        return 1
    failures = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for path, status, findings in pool.map(lambda file: check(options.build, file), files):
            if status:
                failures += 1
                print(f"{path.relative_to(ROOT)}:\n{findings}")
    print(f"clang-tidy: {len(files)} files, {failures} with findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
