"""What octavo_export_cases writes: calls of the operator, and what the oracle computed for them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

BUILT_EXECUTABLE = Path(__file__).resolve().parents[2] / "build/dev/tests/oracle/octavo_export_cases"
NUMPY_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}


@dataclass(frozen=True)
class ExportedCase:
    """One call. `inputs` and `results` carry the operator's names; absent tensors are missing. `inputs` holds the
    caches as they were before the call, `results` as the oracle left them."""

    name: str
    head_size: int
    against: tuple[str, ...]
    attributes: dict
    inputs: dict[str, np.ndarray]
    results: dict[str, np.ndarray]

    @property
    def type(self) -> np.dtype:
        """T."""
        return self.inputs["query"].dtype

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.inputs["past_seqlens"])

    def tokens(self, sequence: int) -> slice:
        """The rows of the new tokens of a sequence."""
        first, last = self.inputs["cumulative_sequence_length"][sequence : sequence + 2]
        return slice(int(first), int(last))

    def past(self, sequence: int) -> int:
        """Tokens in the cache before the call."""
        return int(self.inputs["past_seqlens"][sequence])

    def total(self, sequence: int) -> int:
        """Tokens in the cache after the call."""
        tokens = self.tokens(sequence)
        return self.past(sequence) + tokens.stop - tokens.start

    def cache_rows(self, tensors: dict[str, np.ndarray], name: str, sequence: int, positions: range) -> np.ndarray:
        """(len(positions), G, stored elements) of a cache in `inputs` or `results`; zeros at unmapped positions, which
        exist only below every query's window."""
        cache, table = tensors[name], self.inputs["block_table"][sequence]
        size = cache.shape[1]
        blocks = [int(table[p // size]) for p in positions]
        rows = [
            cache[block, p % size] if block >= 0 else np.zeros(cache.shape[2:], cache.dtype)
            for p, block in zip(positions, blocks, strict=True)
        ]
        return np.array(rows, cache.dtype).reshape(len(rows), *cache.shape[2:])

    def query_key_value(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The new tokens' Q (new, N, H), K and V (new, G, H), whether packed or not."""
        rows = self.tokens(sequence)
        query = self.inputs["query"][rows]
        if "key" in self.inputs:
            parts = [query, self.inputs["key"][rows], self.inputs["value"][rows]]
        else:
            q_width = self.attributes["num_heads"] * self.head_size
            parts = np.split(query, [q_width, (query.shape[1] + q_width) // 2], axis=1)
        q, k, v = (part.reshape(len(part), -1, self.head_size) for part in parts)
        return q, k, v

    def bias(self, sequence: int) -> np.ndarray | None:
        """(1, N or 1, new, total), the part of attention_bias that a sequence uses."""
        if "attention_bias" not in self.inputs:
            return None
        bias, rows = self.inputs["attention_bias"], self.tokens(sequence)
        b = sequence if bias.shape[0] > 1 else 0
        return bias[b : b + 1, :, : rows.stop - rows.start, : self.total(sequence)].copy()

    def query_positions(self, sequence: int) -> np.ndarray:
        """(new,) positions of the new tokens."""
        if "query_positions" in self.inputs:
            return self.inputs["query_positions"][self.tokens(sequence)]
        return np.arange(self.past(sequence), self.total(sequence), dtype=np.int32)

    def visible(self, sequence: int) -> np.ndarray:
        """(new, total) bool: what the causal mask and the window leave."""
        distance = self.query_positions(sequence)[:, None] - np.arange(self.total(sequence))
        seen = np.ones(distance.shape, bool)
        if self.attributes["is_causal"]:
            seen &= distance >= 0
        if self.attributes["local_window_size"] > 0:
            seen &= distance < self.attributes["local_window_size"]
        return seen


def find_executable() -> Path | None:
    """octavo_export_cases: $OCTAVO_EXPORT_CASES, which must exist, else that of the dev preset if it is built."""
    if named := os.environ.get("OCTAVO_EXPORT_CASES"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"OCTAVO_EXPORT_CASES={named}: no such file")
        return Path(named)
    return BUILT_EXECUTABLE if BUILT_EXECUTABLE.is_file() else None


def export_cases(executable: Path) -> list[ExportedCase]:
    """Runs the executable. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([executable.resolve(), folder], check=True)
        data = (Path(folder) / "cases.bin").read_bytes()
        manifest = json.loads((Path(folder) / "cases.json").read_text(encoding="utf-8"))

    def tensors(entries: dict) -> dict[str, np.ndarray]:
        return {
            name: np.frombuffer(data, NUMPY_TYPES[e["type"]], int(np.prod(e["shape"])), e["offset"]).reshape(e["shape"])
            for name, e in entries.items()
        }

    return [
        ExportedCase(
            c["name"],
            c["head_size"],
            tuple(c["against"]),
            c["attributes"],
            tensors(c["inputs"]),
            tensors(c["results"]),
        )
        for c in manifest
    ]
