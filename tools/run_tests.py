"""Build and check everything: `make test`. The last line is `N passed, N failed, N skipped`.

Steps run side by side, at most two at a time; a step starts when those it needs have passed. A step with a JUnit report
counts each test in it; any other step counts as one test. Of a failed step, the output of its failed tests is printed,
or the end of its own; all of it is in build/test-logs/STEP.log. What is skipped, a test or a whole step for want of a
compiler, is printed with its reason.

Usage: run_tests.py [--only STEP_OR_GROUP ...] [--list] [--fuzz-seconds N]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "test-logs"
PYTHON = str(ROOT / ".venv/bin/python")
LANES = 2
JOBS = str(os.cpu_count() or 2)
MAX_PRINTED_CHARACTERS = 6_000  # of one failed step or test
MAX_PRINTED_TESTS = 10  # of one step
# What the preset cuda adds to the others. X/all is all of folder X, as Ninja names it.
CUDA_TARGETS = ["octavo_ort", "octavo_cuda_host_test", "octavo_support_matrix", "tests/cuda/all", "bench/gpu/all"]

Command = list[str]


@dataclass(frozen=True)
class Step:
    """One thing to run. `reports` are JUnit files that its commands write; they must hold at least one test.

    With a `skip` that is not empty, the step is not run and counts as one skipped test, for that reason.
    """

    name: str
    commands: list[Command]
    needs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("test",)
    reports: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""


@dataclass
class Outcome:
    """What came of a step: counts, the text to print where something failed, and the reasons of what was skipped."""

    counts: Counts
    output: str = ""
    skips: Counter[str] = field(default_factory=Counter)


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def cmake_steps(preset: str, groups: tuple[str, ...], ctest: Command) -> list[Step]:
    """Configure, build, and run the C++ tests of a preset."""
    report = LOGS / f"{preset}.xml"
    return [
        Step(
            f"build-{preset}",
            [["cmake", "--preset", preset], ["cmake", "--build", "--preset", preset, "-j", JOBS]],
            groups=groups,
        ),
        Step(
            f"ctest-{preset}",
            [["ctest", "--preset", preset, "-j", str(LANES), "--output-junit", str(report), *ctest]],
            needs=(f"build-{preset}",),
            groups=groups,
            reports=(report,),
        ),
    ]


def cuda_step() -> Step:
    """The CUDA build, what of it runs without a GPU, and the GPU tests, which say why where there is none."""
    build = BUILD / "cuda"
    ctest_report = LOGS / "cuda.xml"
    ort_report = LOGS / "cuda-ort.xml"  # on the CPU: the library serves it with CUDA inside as without
    ort_cuda_report = LOGS / "cuda-ort-cuda.xml"
    library = build / "ort/liboctavo_ort.so"
    compiler = os.environ.get("CUDACXX", "nvcc")
    return Step(
        "cuda",
        [
            ["cmake", "--preset", "cuda"],
            ["cmake", "--build", "--preset", "cuda", "-j", JOBS, "--target", *CUDA_TARGETS],
            ["ctest", "--preset", "cuda", "-R", "^cuda", "--output-junit", str(ctest_report)],
            [PYTHON, "-m", "pytest", "-q", "-n", str(LANES), "tests/ort", f"--junit-xml={ort_report}"],
            [PYTHON, "-m", "pytest", "-q", "tests/ort_cuda", f"--junit-xml={ort_cuda_report}"],
            ["sh", "tests/install/cuda_library.sh", str(library)],
            ["sh", "tests/install/consumer.sh", "build/cuda", "build/consumer-cuda"],
            [PYTHON, "tools/gen_support_matrix.py", "--check", str(build / "tools/octavo_support_matrix")],
            [PYTHON, "tools/run_clang_tidy.py", "--build", str(build), "src/cuda", "src/backends.cc", "ort"],
        ],
        reports=(ctest_report, ort_report, ort_cuda_report),
        environment={"OCTAVO_ORT_LIBRARY": str(library)},
        skip="" if shutil.which(compiler) else f"{compiler} not found: CUDA not built",
    )


def all_steps(fuzz_seconds: int) -> list[Step]:
    """Every step, the long ones first: a free lane takes the first that is ready."""
    neon_report = LOGS / "neon.xml"
    pytest_report = LOGS / "pytest.xml"
    oracle_report = LOGS / "oracle.xml"
    lint = ("test", "lint")
    ruff = str(ROOT / ".venv/bin/ruff")
    return [
        *cmake_steps("dev", ("test",), []),
        Step(
            "python-package",
            [[PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "."]],
        ),
        cuda_step(),
        *cmake_steps("asan", ("test",), []),
        Step(
            "pytest",
            [
                [
                    PYTHON,
                    "-m",
                    "pytest",
                    "-q",
                    "--durations=10",
                    "-n",
                    str(LANES),
                    "--dist=loadfile",
                    "tests/python",
                    "tests/ort",  # the step cuda has tests/ort_cuda
                    f"--junit-xml={pytest_report}",
                ]
            ],
            needs=("python-package",),
            reports=(pytest_report,),
        ),
        Step(
            "oracle",
            [[PYTHON, "-m", "pytest", "-q", "tests/oracle", f"--junit-xml={oracle_report}"]],
            needs=("build-dev",),
            reports=(oracle_report,),
            environment={"OCTAVO_EXPORT_CASES": str(BUILD / "dev/tests/oracle/octavo_export_cases")},
        ),
        Step("clang-tidy", [[PYTHON, "tools/run_clang_tidy.py"]], needs=("build-dev",), groups=lint),
        Step("wheel", [["sh", "tests/install/wheel.sh", str(BUILD / "wheel")]], needs=("python-package",)),
        Step(
            "neon",
            [
                ["cmake", "--preset", "neon"],
                ["cmake", "--build", "--preset", "neon", "-j", JOBS, "--target", "octavo_example", "octavo_cases_test"],
                ["ctest", "--preset", "neon", "-R", "^(example|backends.cases)", "--output-junit", str(neon_report)],
            ],
            reports=(neon_report,),
        ),
        Step("consumer", [["sh", "tests/install/consumer.sh", "build/dev", "build/consumer"]], needs=("build-dev",)),
        Step(
            "layers", [[PYTHON, "tools/check_layers.py", "--self-test"], [PYTHON, "tools/check_layers.py"]], groups=lint
        ),
        Step("clang-format", [[PYTHON, "tools/format_sources.py", "--check"]], groups=lint),
        Step("ruff", [[ruff, "check", "."], [ruff, "format", "--check", "--diff", "."]], groups=lint),
        Step(
            "support-matrix",
            [[PYTHON, "tools/gen_support_matrix.py", "--check"]],
            needs=("build-dev",),
            groups=lint,
        ),
        Step("gpu-check", [[PYTHON, "tools/check_gpu_record.py"]], groups=lint),
        Step(
            "fuzz",
            [["sh", "tools/fuzz.sh", str(fuzz_seconds)]],
            needs=("build-asan", "python-package"),
            groups=("fuzz",),
        ),
    ]


def select(steps: list[Step], wanted: list[str]) -> list[Step]:
    """The steps and groups of `wanted`, and what they need. Raises SystemExit for an unknown name."""
    by_name = {step.name: step for step in steps}
    known = set(by_name) | {group for step in steps for group in step.groups}
    if unknown := set(wanted) - known:
        raise SystemExit(f"unknown step or group: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    names: set[str] = set()
    pending = [step.name for step in steps if step.name in wanted or set(step.groups) & set(wanted)]
    while pending:
        name = pending.pop()
        if name not in names:
            names.add(name)
            pending.extend(by_name[name].needs)
    return [step for step in steps if step.name in names]


def skip_reason(case: ElementTree.Element) -> str:
    """Why a test case of a JUnit report was skipped, in one line."""
    message = case.find("skipped").get("message") or ""  # type: ignore[union-attr]  # the caller has found it
    if not message.startswith("SKIP_"):  # pytest's; CTest tells only by which property it knew
        return message or f"{case.get('name')} says nothing"
    output = "".join(part.text or "" for part in case.iter("system-out"))
    # What octavo's own binaries print, or what follows GTEST_SKIP's place.
    found = re.search(r"^skipped: (.+)$", output, re.MULTILINE) or re.search(r": Skipped\n(.+)$", output, re.MULTILINE)
    return found[1] if found else f"{case.get('name')}: {message}"


def read_reports(reports: tuple[Path, ...]) -> tuple[Counts, list[str], Counter[str]]:
    """The tests in JUnit reports, the text of each failed one, and how many were skipped for which reason.

    An absent or empty report counts as a failure.
    """
    total = Counts()
    failures: list[str] = []
    skips: Counter[str] = Counter()
    for report in reports:
        counts = Counts()
        for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
            if case.find("failure") is not None or case.find("error") is not None:
                counts.failed += 1
                parts = [part.text or "" for tag in ("failure", "error", "system-out") for part in case.iter(tag)]
                failures.append(f"*** {case.get('name')}\n{''.join(parts)[-MAX_PRINTED_CHARACTERS:]}")
            elif case.find("skipped") is not None:
                counts.skipped += 1
                skips[skip_reason(case)] += 1
            else:
                counts.passed += 1
        if counts == Counts():
            counts.failed = 1
        total.add(counts)
    return total, failures, skips


def run_step(step: Step) -> Outcome:
    """Run the commands until one fails."""
    if step.skip:
        return Outcome(Counts(skipped=1), skips=Counter({step.skip: 1}))
    log = LOGS / f"{step.name}.log"
    for report in step.reports:
        report.unlink(missing_ok=True)
    succeeded = True
    with log.open("w", encoding="utf-8") as file:
        for command in step.commands:
            print("+", *command, file=file, flush=True)
            try:
                completed = subprocess.run(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **step.environment},
                    check=False,
                )
                succeeded = completed.returncode == 0
            except OSError as error:
                print(f"{command[0]}: {error}", file=file)
                succeeded = False
            if not succeeded:
                break
    counts, failures, skips = read_reports(step.reports) if step.reports else (Counts(passed=1), [], Counter())
    if not succeeded and counts.failed == 0:
        counts = Counts(counts.passed if step.reports else 0, 1, counts.skipped)
    output = "\n".join(failures[:MAX_PRINTED_TESTS])
    if counts.failed and not failures:
        output = log.read_text(encoding="utf-8", errors="replace")[-MAX_PRINTED_CHARACTERS:]
    return Outcome(counts, output, skips)


class Runner:
    """Runs steps in LANES threads, each as soon as what it needs has passed."""

    def __init__(self, steps: list[Step]) -> None:
        self.waiting = list(steps)
        self.finished: dict[str, bool] = {}
        self.total = Counts()
        self.changed = threading.Condition()

    def run(self) -> Counts:
        lanes = [threading.Thread(target=self._lane) for _ in range(LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        return self.total

    def _lane(self) -> None:
        while (step := self._next()) is not None:
            started = time.monotonic()
            outcome = run_step(step)
            self._finish(step, outcome, f"{time.monotonic() - started:.0f} s")

    def _next(self) -> Step | None:
        with self.changed:
            while self.waiting:
                for step in self.waiting:
                    states = [self.finished.get(need) for need in step.needs]
                    if False in states:
                        self.waiting.remove(step)
                        self._record(step, Outcome(Counts(failed=1)), "not run: something it needs failed")
                        break
                    if None not in states:
                        self.waiting.remove(step)
                        return step
                else:
                    self.changed.wait()
            return None

    def _finish(self, step: Step, outcome: Outcome, note: str) -> None:
        with self.changed:
            self._record(step, outcome, note)

    def _record(self, step: Step, outcome: Outcome, note: str) -> None:
        counts = outcome.counts
        self.finished[step.name] = counts.failed == 0
        self.total.add(counts)
        if outcome.output:
            print(f"--- {step.name} (all of its output: build/test-logs/{step.name}.log) ---\n{outcome.output}\n---")
        print(f"{'FAILED' if counts.failed else 'ok    '} {step.name}: {counts} ({note})", flush=True)
        for reason, times in outcome.skips.items():
            print(f"       {times} skipped: {reason}", flush=True)
        self.changed.notify_all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["test"], metavar="STEP_OR_GROUP")
    parser.add_argument("--list", action="store_true", help="print the steps and their groups")
    parser.add_argument("--fuzz-seconds", type=int, default=600)
    options = parser.parse_args()
    steps = all_steps(options.fuzz_seconds)
    if options.list:
        for step in steps:
            print(step.name, *(f"[{group}]" for group in step.groups))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    total = Runner(select(steps, options.only)).run()
    print(total, flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
