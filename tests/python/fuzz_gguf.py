"""Fuzzing of the GGUF reader and of everything convert() builds on it.

    python tests/python/fuzz_gguf.py --seconds 60 [--seed 1]

A mutated file may be accepted or refused with OctavoError; any other exception, a case that takes longer than
CASE_SECONDS, or a process that grows beyond MEMORY_BYTES is a finding: the case's seed is printed.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from models_support import TinyShape, write_tiny_gguf
from tiny_architectures import CASES, write_gguf

from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.graph import GraphOptions

CASE_SECONDS = 5.0
MEMORY_BYTES = 6 << 30
KINDS = ("F32", "F16", "Q4_1", "Q8_0")
# Numbers that break careless readers: wrapping sums, negative when signed, zero, almost right.
WILD = (0, 1, 2, 7, 8, 9, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """One to eight damages: flipped bytes, wild integers, cut, repeated or removed spans; mostly in the header."""
    mutated = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        if len(mutated) < 16:
            break
        reach = len(mutated) if rng.random() < 0.2 else min(len(mutated), 1500 if rng.random() < 0.5 else 12_000)
        at = int(rng.integers(0, reach))
        action = rng.integers(0, 6)
        if action == 0:
            mutated[at] ^= 1 << int(rng.integers(0, 8))
        elif action == 1:
            mutated[at] = int(rng.integers(0, 256))
        elif action == 2:
            layout = "<Q" if rng.random() < 0.6 else "<I"
            value = WILD[int(rng.integers(0, len(WILD)))] & (2**64 - 1 if layout == "<Q" else 2**32 - 1)
            mutated[at : at + struct.calcsize(layout)] = struct.pack(layout, value)
        elif action == 3:
            del mutated[at:]
        elif action == 4:
            del mutated[at : at + int(rng.integers(1, 64))]
        else:
            mutated[at:at] = mutated[at : at + int(rng.integers(1, 64))]
    return bytes(mutated)


def originals(folder: Path) -> list[bytes]:
    """One small valid file of each kind, with and without the optional keys, and of each architecture."""
    shape = TinyShape(layers=1, hidden=32, feed=32, heads=2, kv_heads=1, head_size=16)
    files = []
    for kind, optional_keys in itertools.product(KINDS, (False, True)):
        path = folder / f"{kind}-{optional_keys}.gguf"
        write_tiny_gguf(path, shape, kind, optional_keys=optional_keys)
        files.append(path.read_bytes())
    for name, case in CASES.items():
        path = folder / f"{name}.gguf"
        write_gguf(path, case, "MXFP4" if case.architecture == "gpt-oss" else "Q5_1")
        files.append(path.read_bytes())
    return files


def check_case(files: list[bytes], seed: int, folder: Path) -> bool:
    """Runs the case of this seed; returns whether the file was accepted. Raises AssertionError for a finding."""
    rng = np.random.default_rng(seed)
    data = mutate(files[int(rng.integers(0, len(files)))], rng)
    source, target = folder / "case.gguf", folder / "model"
    source.write_bytes(data)
    shutil.rmtree(target, ignore_errors=True)
    start = time.monotonic()
    accepted = True
    try:
        convert(source, target, GraphOptions(weight_form="int4" if rng.random() < 0.5 else "float32"))
    except OctavoError as error:
        accepted = False
        message = str(error)
        assert message.isprintable() and len(message) < 1000, f"seed {seed}: not one sentence: {message!r}"
        assert not target.exists(), f"seed {seed}: a refused file left {target}"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    seconds = time.monotonic() - start
    assert seconds < CASE_SECONDS, f"seed {seed}: {seconds:.1f} s"
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    end = time.monotonic() + options.seconds
    accepted = cases = 0
    with tempfile.TemporaryDirectory() as name:
        files = originals(Path(name))
        for seed in itertools.count(options.seed):
            if time.monotonic() > end:
                break
            accepted += check_case(files, seed, Path(name))
            cases += 1
    print(f"{cases:,} cases from seed {options.seed}, {accepted:,} accepted, no findings")


if __name__ == "__main__":
    sys.exit(main())
