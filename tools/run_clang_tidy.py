"""Run clang-tidy (.clang-tidy) over the library's own sources, with the compile commands of build/dev."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/dev"
FOLDERS = ("src", "ort")
JOBS = 2
# The compile commands are GCC's; clang does not know all of its warning options, nor every use of a target attribute.
EXTRA_ARGUMENTS = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-pragma-clang-attribute"]


def sources() -> list[Path]:
    """The compiled files of FOLDERS. Each is checked once, however often it is compiled."""
    commands = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
    files = {Path(command["file"]) for command in commands}
    return sorted(path for path in files if any(path.is_relative_to(ROOT / folder) for folder in FOLDERS))


def check(path: Path) -> tuple[Path, int, str]:
    """Returns the file, clang-tidy's exit status and its findings."""
    command = ["clang-tidy", "--quiet", "-p", str(BUILD), *EXTRA_ARGUMENTS, str(path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return path, completed.returncode, completed.stdout + (completed.stderr if completed.returncode else "")


def main() -> int:
    files = sources()
    if not files:
        print(f"no compile command for {', '.join(FOLDERS)} in {BUILD}; build the dev preset first")
        return 1
    failures = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for path, status, findings in pool.map(check, files):
            if status:
                failures += 1
                print(f"{path.relative_to(ROOT)}:\n{findings}")
    print(f"clang-tidy: {len(files)} files, {failures} with findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
