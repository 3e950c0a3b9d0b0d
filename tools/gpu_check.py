"""Run the GPU tests, those through ONNX Runtime, compute-sanitizer and the GPU benchmark, and write what came out to
docs/gpu_check.json.

The file names the sources that it speaks for by their git tree ids, so that a stale one shows. The tests through ONNX
Runtime need an onnxruntime with the CUDA provider that python3 can import; without one they are left out, and the file
says why, unless --ort demands them.

Usage: gpu_check.py [--build DIR] [--output FILE] [--lanes N] [--ort] [--skip tests|ort|sanitizers|bench ...]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("src/cuda", "ort")

# Every feature, the sizes with kernels of their own, split rows, and the hostile data: under a sanitizer a test takes
# many times as long.
SANITIZED_TESTS = ":".join(
    (
        "Feature/*",
        "Short/EveryDecodeKernel.*",
        "Type/*float16_k_int8_v_float8e4m3fn",
        "Type/*bfloat16_k_int4_channel_v_float4e2m1",
        "Size/*head_size_64_float16",
        "Size/*head_size_128_bfloat16",
        "Size/*head_size_256_float16_k_int4_v_int8",
        "Size/*head_size_512_*",
        "Size/*latent_576_512*",
        "Size/*latent_1024_1024*",
        "Length/*decode_after_2049",
        "Length/*prefill_129",
        "Length/*long_context_quantized",
        "CudaHostileIds.*",
        "CudaHostileLengths.*",
        "CudaHostileBounds.*",
    )
)
SANITIZERS = ("memcheck", "initcheck", "synccheck", "racecheck")
# racecheck records every access to shared memory, of which the decode kernels make many: no hostile data for it.
RACECHECK_TESTS = ":".join(
    name for name in SANITIZED_TESTS.split(":") if "Hostile" not in name and "latent" not in name
)
# Kernels whose hazards racecheck reports and there are none, with the reason.
RACECHECK_ALLOWED: tuple[tuple[str, str], ...] = ()
SANITIZER_SECONDS = 280
ERROR_STATUS = 99  # of a process in which a sanitizer found something
# Processes that share out the list of each tool: the tools are slow on the host's side.
SANITIZER_SHARDS = {"memcheck": 2, "initcheck": 2, "synccheck": 2, "racecheck": 5}


def tree_id(folder: Path) -> str:
    """The id that git would give the folder's tree, committed or not; empty for a folder that is not there."""
    if not folder.is_dir():
        return ""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        if path.is_dir():
            entries.append((path.name + "/", b"40000", bytes.fromhex(tree_id(path))))
        else:
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            data = path.read_bytes()
            entries.append((path.name, mode, hashlib.sha1(b"blob %d\0" % len(data) + data).digest()))
    body = b"".join(mode + b" " + name.rstrip("/").encode() + b"\0" + digest for name, mode, digest in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest()


def device() -> dict[str, str]:
    """Name and driver of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader", "--id=0"]
    name, driver, capability = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split(", ")
    return {"name": name, "driver": driver, "compute_capability": capability.strip()}


def run_shard(binary: Path, folder: Path, shard: int, shards: int) -> tuple[int, list[str], str]:
    """One share of the tests: how many ran, which failed, and the log."""
    report = folder / f"shard{shard}.json"
    environment = {**os.environ, "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
    command = [str(binary), "--gtest_brief=1", f"--gtest_output=json:{report}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not report.is_file():  # no GPU, or the process died
        return 0, [f"shard {shard} ended with {done.returncode}: {done.stdout[-400:]}"], done.stdout
    failed = []
    ran = 0
    for suite in json.loads(report.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            ran += test["status"] == "RUN"
            if "failures" in test:
                failed.append(f"{suite['name']}.{test['name']}")
    if done.returncode != 0 and not failed:
        failed.append(f"shard {shard} ended with {done.returncode}")
    return ran, failed, done.stdout


def run_tests(binary: Path, lanes: int) -> dict[str, object]:
    """All tests, in `lanes` processes."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(lanes) as pool:
        shards = list(pool.map(lambda shard: run_shard(binary, Path(folder), shard, lanes), range(lanes)))
    failed = sorted(name for _, names, _ in shards for name in names)
    if failed:
        print("\n".join(log[-3000:] for _, names, log in shards if names))
    return {"passed": sum(ran for ran, _, _ in shards) - len(failed), "failed": failed}


def run_sanitizer_shard(binary: Path, tool: str, shard: int) -> dict[str, object]:
    """One share of the reduced list under one tool of compute-sanitizer."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
    command += [str(binary), "--separate_allocations"]
    names = RACECHECK_TESTS if tool == "racecheck" else SANITIZED_TESTS
    command += ["--gtest_brief=1", f"--gtest_filter={names}"]
    shards = {"GTEST_TOTAL_SHARDS": str(SANITIZER_SHARDS[tool]), "GTEST_SHARD_INDEX": str(shard)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SANITIZER_SECONDS, env={**os.environ, **shards}
        )
    except subprocess.TimeoutExpired as expired:
        print(f"{tool}:\n{str(expired.stdout)[-2000:]}")
        return {"ok": False, "tests": 0, "summary": f"stopped after {SANITIZER_SECONDS} s"}
    log = done.stdout + done.stderr
    ran = re.search(r"(\d+) tests? from .* ran", log)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", log)
    allowed = allowed_hazards(log) if tool == "racecheck" and done.returncode == ERROR_STATUS else []
    ok = (done.returncode == 0 or bool(allowed)) and ran is not None and bool(summary)
    if not ok:
        print(f"{tool}:\n{log[-6000:]}")
    return {
        "ok": ok,
        "tests": int(ran.group(1)) if ran else 0,
        "summary": summary[-1] if summary else "none",
        "allowed": allowed,
    }


def allowed_hazards(log: str) -> list[str]:
    """The reasons that allow every error in racecheck's log; none if one has no reason or is no hazard."""
    errors = re.findall(r"^=+ Error: (.*)", log, re.MULTILINE)
    kernels = re.findall(r"(?:Read|Write) access at (.*)", log)
    reasons = [[why for pattern, why in RACECHECK_ALLOWED if re.search(pattern, kernel)] for kernel in kernels]
    only_hazards = bool(errors) and all(error.startswith("Race reported between") for error in errors)
    if not only_hazards or not all(reasons) or "FAILED" in log:
        return []
    return sorted({why for found in reasons for why in found})


def run_sanitizer(binary: Path, tool: str) -> dict[str, object]:
    """The reduced list under one tool, in several processes."""
    shards = SANITIZER_SHARDS[tool]
    with ThreadPoolExecutor(shards) as pool:
        results = list(pool.map(lambda shard: run_sanitizer_shard(binary, tool, shard), range(shards)))
    return {
        "ok": all(result["ok"] for result in results),
        "tests": sum(result["tests"] for result in results),
        "summary": "; ".join(sorted({str(result["summary"]) for result in results})),
        "allowed": sorted({why for result in results for why in result.get("allowed", [])}),
    }


# Copies, workspaces, host and device inputs of a call, bad values, and a captured graph.
SANITIZED_ORT_TESTS = " or ".join(
    (
        "nineteen_inputs",
        "bound_elsewhere",
        "long_contexts",
        "garbage",
        "wild_block_id",
        "(replays_equal_plain_runs and int8_decode)",
    )
)
ORT_SECONDS = 400
# Measures the device's free memory, which sessions of other processes change.
ALONE = "test_many_sessions_leave_no_memory"


def find_onnxruntime() -> tuple[str, str]:
    """The version of the onnxruntime that can be imported, and why the tests cannot use it (empty: they can)."""
    script = "import onnxruntime as o; print(o.__version__, 'CUDAExecutionProvider' in o.get_available_providers())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode != 0:
        return "", "no onnxruntime can be imported"
    version, has_provider = done.stdout.split()
    return version, "" if has_provider == "True" else f"onnxruntime {version} has no CUDAExecutionProvider"


def run_pytest(library: Path, arguments: list[str], wrapper: list[str] | None = None) -> dict[str, object]:
    """tests/ort_cuda with the library: how many passed, and the names of those that failed or were skipped."""
    command = [*(wrapper or []), sys.executable, "-m", "pytest", "tests/ort_cuda", "-q", "--tb=short", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "OCTAVO_ORT_LIBRARY": str(library)}
        try:
            done = subprocess.run(
                [*command, f"--junit-xml={report}"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=ORT_SECONDS,
            )
            log, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            log, code = str(expired.stdout), f"no end within {ORT_SECONDS} s"
        passed, failed, skipped = 0, [], []
        for case in ElementTree.parse(report).getroot().iter("testcase") if report.is_file() else ():
            name = f"{(case.get('classname') or '').rpartition('.')[2]}.{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif case.find("skipped") is not None:
                skipped.append(name)
            else:
                passed += 1
    if code != 0 and not failed:
        failed.append(f"pytest ended with {code}")
    if failed:
        print(log[-20000:])
    return {"passed": passed, "failed": failed, "skipped": skipped, "log": log}


def run_ort(library: Path, lanes: int) -> dict[str, object]:
    """The tests through ONNX Runtime but ALONE, in `lanes` processes where pytest-xdist is there."""
    return run_pytest(
        library, ["-k", f"not {ALONE}", *(["-n", str(lanes)] if importlib.util.find_spec("xdist") else [])]
    )


def ort_report(version: str, runs: list[dict[str, object]]) -> dict[str, object]:
    """What the record says of them. Nothing may be skipped."""
    return {
        "onnxruntime": version,
        "passed": sum(run["passed"] for run in runs),
        "failed": sorted(name for run in runs for name in (*run["failed"], *run["skipped"])),
    }


def run_ort_memcheck(library: Path) -> dict[str, object]:
    """A few of them under memcheck, in one process."""
    wrapper = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(ERROR_STATUS)]
    run = run_pytest(library, ["-k", SANITIZED_ORT_TESTS, "-p", "no:xdist"], wrapper)
    summary = re.findall(r"ERROR SUMMARY: .*", str(run["log"]))
    ok = run["passed"] > 0 and not run["failed"] and not run["skipped"] and bool(summary)
    return {"ok": ok, "tests": run["passed"], "summary": summary[-1] if summary else ""}


def run_bench(binary: Path) -> list[dict[str, object]]:
    """The benchmark's rows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "bench.json"
        subprocess.run([str(binary), str(report)], check=True)
        return json.loads(report.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/gpu_check.json")
    parser.add_argument("--lanes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--ort", action="store_true", help="fail where the tests through ONNX Runtime cannot run")
    parser.add_argument("--skip", nargs="*", choices=("tests", "ort", "sanitizers", "bench"), default=[])
    options = parser.parse_args()
    folder = options.build / "tests/cuda"
    library = (options.build / "ort/liboctavo_ort.so").resolve()

    report: dict[str, object] = {
        "trees": {name: tree_id(ROOT / name) for name in TREES},
        "device": device(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }

    def write(ok: bool) -> None:
        """After each part, so that a run that is stopped leaves what it had. "ok" only comes with the last one."""
        report["ok"] = ok
        options.output.write_text(json.dumps(report, indent=1) + "\n")

    ok = True
    if "tests" not in options.skip:
        report["tests"] = run_tests(folder / "octavo_cuda_test", options.lanes)
        ok = not report["tests"]["failed"] and report["tests"]["passed"] > 0
        write(False)
    if "bench" not in options.skip:  # before the sanitizers, which slow the card down
        report["bench"] = run_bench(folder / "octavo_cuda_bench")
    version, reason = find_onnxruntime()
    with_ort = "ort" not in options.skip and not reason
    if "ort" not in options.skip and reason:
        report["ort"] = {"onnxruntime": version, "passed": 0, "failed": [], "left_out": reason}
        ok = ok and not options.ort
    # The sanitizers are a process each that waits for the device; the tests through ONNX Runtime go on beside them.
    with ThreadPoolExecutor(len(SANITIZERS) + 2) as pool:
        runs = {}
        if "sanitizers" not in options.skip and "tests" not in options.skip:
            binary = folder / "octavo_cuda_test"
            runs |= {tool: pool.submit(run_sanitizer, binary, tool) for tool in SANITIZERS}
        if "sanitizers" not in options.skip and with_ort:
            runs["memcheck, onnxruntime"] = pool.submit(run_ort_memcheck, library)
        ort_run = pool.submit(run_ort, library, max(1, options.lanes // 2)) if with_ort else None
        sanitizers = {tool: run.result() for tool, run in runs.items()}
    if sanitizers:
        report["sanitizers"] = sanitizers
        ok = ok and all(result["ok"] for result in sanitizers.values())
    if ort_run is not None:
        report["ort"] = ort_report(version, [ort_run.result(), run_pytest(library, ["-k", ALONE])])
        ok = ok and report["ort"]["passed"] > 0 and not report["ort"]["failed"]
    write(ok)
    print(json.dumps({key: report[key] for key in ("tests", "ort", "sanitizers", "ok") if key in report}, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
