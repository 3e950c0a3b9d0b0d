"""Check that docs/gpu_check.json speaks for the sources as they stand, and that everything in it passed.

The machine that runs `make test` need not have a GPU; the record says that a machine which has one ran exactly these
sources. It is made by tools/gpu_check.sh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu_check import ROOT, TREES, tree_id

RECORD = ROOT / "docs/gpu_check.json"
PARTS = ("tests", "ort")  # the library's own tests, and those through ONNX Runtime


def problems(record: dict, root: Path = ROOT) -> list[str]:
    """What is wrong with the record, a sentence each; empty where it holds for the sources under `root`."""
    found = []
    recorded = record.get("trees", {})
    for name in TREES:
        if (now := tree_id(root / name)) != (then := recorded.get(name, "none")):
            found.append(f"{name} has the tree id {now}, the record was made for {then}")
    for part in PARTS:
        tests = record.get(part, {})
        if not tests.get("passed"):
            found.append(f'"{part}": no test passed ({tests.get("left_out", "not run")})')
        if tests.get("failed"):
            found.append(f'"{part}": failed are {", ".join(tests["failed"])}')
    found += [
        f"{tool}: not ok" for tool, result in record.get("sanitizers", {}).items() if result.get("ok") is not True
    ]
    if not record.get("sanitizers"):
        found.append("no sanitizer ran")
    if record.get("ok") is not True:
        found.append(f'"ok" is {json.dumps(record.get("ok"))}')
    return found


def self_test() -> None:
    """Each problem must be found in a record that has it, and none in one that has not."""
    good = {
        "trees": {name: tree_id(ROOT / name) for name in TREES},
        **{part: {"passed": 1, "failed": []} for part in PARTS},
        "sanitizers": {"memcheck": {"ok": True}},
        "ok": True,
    }
    if found := problems(good):
        raise SystemExit(f"self-test: a good record was refused: {found}")
    broken = {
        "a stale tree": {"trees": {**good["trees"], TREES[0]: "0" * 40}},
        "a missing tree": {"trees": {}},
        "no tests": {"tests": {"passed": 0, "failed": []}},
        "a failed test": {"tests": {"passed": 1, "failed": ["A.B"]}},
        "nothing through ONNX Runtime": {"ort": {"passed": 0, "failed": [], "left_out": "no onnxruntime"}},
        "a failed test through ONNX Runtime": {"ort": {"passed": 1, "failed": ["A.B"]}},
        "a failed sanitizer": {"sanitizers": {"memcheck": {"ok": False}}},
        "no sanitizers": {"sanitizers": {}},
        "not ok": {"ok": False},
        "ok as a text": {"ok": "true"},
    }
    for what, change in broken.items():
        if not problems({**good, **change}):
            raise SystemExit(f"self-test: a record with {what} was accepted")


def main() -> int:
    self_test()
    try:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{RECORD.name} cannot be read: {error}")
        return 1
    if found := problems(record):
        print(f"{RECORD.name} does not hold for these sources: {'; '.join(found)}")
        print("Run tools/gpu_check.sh on a machine with a GPU and commit what it writes.")
        return 1
    device = record.get("device", {})
    passed = sum(record[part]["passed"] for part in PARTS)
    print(f"{RECORD.name}: {passed} tests passed on {device.get('name')}, {record.get('date')}")
    for tool, result in record["sanitizers"].items():
        for reason in result.get("allowed", ()):
            print(f"{tool}, allowed: {reason}")
    if "note" in record:  # by whoever put it together from more than one run, or judged a part by hand
        print(f"note: {record['note']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
