"""The decode table: floor, peers, ours and bars, from one command on a machine with a GPU.

  cmake -S . -B build/cuda -G Ninja -DOCTAVO_CUDA=ON -DOCTAVO_BUILD_BENCH=ON && cmake --build build/cuda
  python3 bench/gpu/run.py --binary build/cuda/bench/gpu/octavo_gpu_bench

Runs octavo_gpu_bench (ours and the read limit), then every peer that is installed, prints the table, and writes
--output (JSON) with a PNG beside it. The binary may come from another machine. Peers need torch; a peer that is not
installed is recorded as absent. Exit status 1: a row of ours failed. Bars that are missed are shown, no more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plot
import rows as table_rows
import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PEERS = ("flash_attention3", "cudnn_sdpa", "onnxruntime_builtin")
PEER_SECONDS = 240
ABSENT = 3


def commit() -> str:
    """The checkout's commit, "+changes" behind it where files differ; "unknown" outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def run_ours(binary: Path, works: list[str], backend: str, folder: Path) -> tuple[dict[str, Any], bool]:
    """What octavo_gpu_bench measured, and whether every row is right. Raises RuntimeError if it left no report."""
    listed, report = folder / "works.txt", folder / "ours.json"
    listed.write_text("\n".join(works) + "\n")
    command = [str(binary), "--works", str(listed), "--json", str(report)]
    done = subprocess.run(command + (["--backend", backend] if backend else []), check=False)
    if not report.is_file():
        raise RuntimeError(f"{binary} ended with status {done.returncode} and without a report")
    return json.loads(report.read_text()), done.returncode == 0


def run_peer(module: str, works: list[str], library: Path | None, folder: Path) -> dict[str, Any]:
    """The report of one peer, {"peer", "version", "rows"}; {"absent": why} where it is not installed or broke down."""
    listed, report, log = folder / f"{module}.txt", folder / f"{module}.json", folder / f"{module}.log"
    listed.write_text("\n".join(works) + "\n")
    command = [sys.executable, "-m", f"peers.{module}", "--works", str(listed), "--json", str(report)]
    if library:
        command += ["--library", str(library.resolve())]
    with log.open("w") as stream:
        try:
            status = subprocess.run(
                command, cwd=HERE, stdout=stream, stderr=subprocess.STDOUT, timeout=PEER_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    last = (log.read_text().strip().splitlines() or [""])[-1][:300]
    if status == 0:
        return json.loads(report.read_text())
    if status == ABSENT:
        return {"absent": last}
    why = f"stopped after {PEER_SECONDS} s" if status == -1 else f"ended with status {status}: {last}"
    print(f"{module} {why}", file=sys.stderr)
    if not report.is_file():
        return {"absent": why}
    return json.loads(report.read_text()) | {"stopped": why}  # what it measured until then


def collect(reports: dict[str, dict[str, Any]]) -> tuple[table.Peers, dict[str, Any]]:
    """Peers by work, and what stands about them in the result file. reports: module -> what run_peer() returned."""
    peers: table.Peers = {}
    about: dict[str, Any] = {}
    for module, report in reports.items():
        if "absent" in report:
            about[module] = {"absent": report["absent"]}
            continue
        refusals = {row["work"]: row["refusal"] for row in report["rows"] if "refusal" in row}
        about[module] = {"version": report["version"], "date": report["date"], "refusals": refusals}
        if "stopped" in report:
            about[module]["stopped"] = report["stopped"]
        for row in report["rows"]:
            for name, us in row.get("us", {}).items():
                peers.setdefault(row["work"], {})[name] = {"us": us, "error": float(f"{row['error']:.2g}")}
    return peers, about


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build/cuda/bench/gpu/octavo_gpu_bench")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="rows whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the rows and their bars; needs no GPU")
    parser.add_argument("--backend", default="", help="force this backend of the library")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which to run; none given: none")
    parser.add_argument("--library", type=Path, help="folder with FlashAttention-3's library")
    parser.add_argument("--earlier", type=Path, help="result file that gives the peers that are not measured now")
    parser.add_argument("--commit", default="", help="what to record; default: the checkout's")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/decode.json")
    parser.add_argument("--logs", type=Path, help="folder to keep the peers' reports and logs in")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    rows = table_rows.select(table_rows.all_rows(), options.only)
    if options.list:
        for row in rows:
            print(f"{row.work:<50} {row.bar.kind} {row.bar.value:g} {row.bar.of}".rstrip())
        return 0
    if not rows:
        print(f"no row contains any of {options.only}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ours, ok = run_ours(options.binary, list(dict.fromkeys(row.measured for row in rows)), options.backend, folder)
        works = table_rows.for_peers(rows)
        reports = {module: run_peer(module, works, options.library, folder) for module in options.peers}
    peers, about = collect(reports)
    if options.earlier:
        earlier = json.loads(options.earlier.read_text())
        table.take_over(peers, earlier["rows"])
        for module, facts in earlier["about_peers"].items():
            if "absent" in about.get(module, {"absent": ""}):
                about[module] = facts
    limit = {f"{read['bytes'] >> 20} MiB": read["us"] for read in ours["limit"]}
    report = {
        "commit": options.commit or commit(),
        "device": ours["device"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "limit": limit,
        "about_peers": about,
        "rows": table.evaluate(rows, limit, ours["rows"], peers),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print("read limit: " + ", ".join(f"{size} {us:.1f} us" for size, us in limit.items()))
    for module, facts in about.items():
        print(f"{module}: " + (f"absent: {facts['absent']}" if "absent" in facts else facts["version"]))
    print(table.format_table(report["rows"]))
    try:
        plot.draw(report, options.output.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return 1
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
