"""`octavo bench`: decode on this machine's CPU: a plain read, stock onnxruntime, and octavo.paged_attention, by turns.

bench/cpu of the source repository is the full table, through ONNX Runtime on both sides and with the project's bars.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import processors
from .errors import OctavoError, first_line
from .progress import Progress, no_progress
from .sizes import shown_bytes

STOCK = "onnxruntime GroupQueryAttention"
MIN_ROUNDS, MAX_ROUNDS = 7, 400
DISTINCT_BYTES = 256 << 20  # calls go round caches of so many bytes in all, which few last-level caches hold
MAX_SETS = 2048  # one for each call, each with its own binding; works below 128 KiB go round less
NO_MATPLOTLIB = "the picture needs matplotlib; run `pip install matplotlib`."
SCALE = np.float32(0.02)  # between the codes of the integer caches


@dataclass(frozen=True)
class CacheType:
    """How a cache stores a channel. short: in work names. query: of Q, the new K and V, and the output."""

    name: str
    short: str
    stored: Any
    query: Any
    bits: int
    bound: float  # relative error that is allowed against float64


CACHE_TYPES = {
    kind.name: kind
    for kind in (
        CacheType("float32", "fp32", np.float32, np.float32, 32, 1e-5),
        CacheType("float16", "fp16", np.float16, np.float16, 16, 2.0**-11 + 1e-5),
        CacheType("int8", "int8", np.int8, np.float32, 8, 1e-5),
        CacheType("float8e4m3fn", "fp8", ml_dtypes.float8_e4m3fn, np.float32, 8, 1e-5),
        CacheType("int4", "int4", np.uint8, np.float32, 4, 1e-5),
    )
}
STOCK_BOUND = 1e-2  # its float16 arithmetic


@dataclass(frozen=True)
class Work:
    """One decode call: each of `batch` sequences holds `context` tokens, the last of which is new."""

    cache: CacheType
    num_heads: int
    kv_num_heads: int
    head_size: int
    context: int
    batch: int
    block_size: int

    @property
    def name(self) -> str:
        """CACHE HEADS/KVxSIZE CONTEXTxBATCH[ VARIANT], as in bench/results."""
        geometry = f"{self.num_heads}/{self.kv_num_heads}x{self.head_size} {self.context}x{self.batch}"
        variant = "" if self.cache.stored == self.cache.query else " fp32 Q"
        return f"{self.cache.short} {geometry}{variant}"

    @property
    def byte_count(self) -> int:
        """Of K and V, which attention reads once."""
        return self.batch * self.context * self.kv_num_heads * 2 * self.head_size * self.cache.bits // 8

    @property
    def set_count(self) -> int:
        """Sets of distinct caches that the calls go round."""
        return min(MAX_SETS, -(-DISTINCT_BYTES // self.byte_count))

    @property
    def memory_bytes(self) -> int:
        """What measuring takes: all sets contiguous and in pages, their block table, the tokens, and the check.

        The check holds K and V of one sequence in float64, and parts of them again; onnxruntime holds float32 scores.
        """
        pages = -(-self.context // self.block_size)
        caches = self.set_count * self.byte_count
        padded = caches // self.context * pages * self.block_size
        table = 12 * self.set_count * self.batch * pages  # int64 when it is drawn, then int32
        tokens = 8 * self.batch * (3 * self.num_heads + 2 * self.kv_num_heads) * self.head_size
        check = 3 * 8 * self.context * self.kv_num_heads * self.head_size
        scores = 4 * self.batch * self.num_heads * self.context
        return caches + padded + table + tokens + max(check, scores)


def run(
    works: Iterable[Work],
    *,
    threads: int | None = None,
    seconds: float = 2.0,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measures works one after another and returns the report, in the form of the files in bench/results.

    "version", octavo's, takes the place of their "commit".

    Args:
        threads: of everything alike; None = one for each processor that this process may use.
        seconds: to measure one work.
        progress: called as (work, works done, works in all).

    Every row: us of ours_us, floor_us (a plain read of as many bytes), peers, and bar_us, the quickest peer, null
    without one; peer_refusals, why a peer is missing; percent_of_limit; gb_per_s; error, of ours against attention in
    float64; ring_bytes, of all the caches that the calls go round; others_percent, of the processors' time, taken by
    other processes meanwhile (null where the system does not tell).

    Raises OctavoError where a work does not fit the memory (before any is measured), threads are more than processors,
    or a result is wrong.
    """
    listed = list(works)
    team = threads or processors.processor_count()
    processors.check_threads(team)
    _check_memory(listed)
    rows = []
    for index, work in enumerate(listed):
        progress(work.name, index, len(listed))
        try:
            rows.append(_measure(work, team, seconds))
        except MemoryError:
            raise OctavoError(
                f"{work.name} needs more memory than there is; choose a shorter context or a smaller batch."
            ) from None
    progress("", len(listed), len(listed))
    read = max(row["bytes"] / row["floor_us"] for row in rows) / 1e3
    return {
        "version": _version(),
        "device": _device(),
        "threads": team,
        "date": datetime.date.today().isoformat(),
        "limit": {"read GB/s": round(read, 2)},
        "about_peers": {STOCK: {"version": _onnxruntime_version()}},
        "rows": rows,
    }


def _check_memory(works: Iterable[Work]) -> None:
    """Linux promises more memory than there is, and kills whoever takes it: what is needed is compared before."""
    from .memory import available_bytes

    available = available_bytes()
    for work in works:
        if available is not None and work.memory_bytes > available:
            raise OctavoError(
                f"{work.name} needs {shown_bytes(work.memory_bytes)} of memory, and {shown_bytes(available)} are "
                "available; choose a shorter context or a smaller batch."
            )


def _measure(work: Work, threads: int, seconds: float) -> dict[str, Any]:
    calls = _Calls(work, threads)
    error, stock_error = calls.verify()
    with ThreadPoolExecutor(threads) as pool:

        def read(index: int) -> None:
            """As many bytes, half the ring away from what the others have just read."""
            chosen = [cache[(index + calls.count // 2) % calls.count] for cache in calls.contiguous]
            words = [cache.reshape(-1).view(np.uint8)[: cache.nbytes // 8 * 8].view(np.uint64) for cache in chosen]
            parts = [part for side in words for part in np.array_split(side, threads) if part.size]
            list(pool.map(np.bitwise_or.reduce, parts))

        runners = {"floor": read, "ours": calls.run_ours}
        if calls.run_stock is not None:
            runners[STOCK] = calls.run_stock
        before = processors.processor_seconds()
        us = _sample(runners, calls.count, seconds)
        others = processors.others_percent(before, processors.processor_seconds())
    peers = {STOCK: us[STOCK]} if STOCK in us else {}
    return {
        "work": work.name,
        "ours_us": us["ours"],
        "floor_us": us["floor"],
        "peers": peers,
        "bar_us": min(peers.values(), default=None),
        "percent_of_limit": round(100 * us["floor"] / us["ours"], 1),
        "gb_per_s": round(work.byte_count / us["ours"] / 1e3, 2),
        "bytes": work.byte_count,
        "ring_bytes": calls.count * work.byte_count,
        "others_percent": others,
        "error": float(f"{error:.2g}"),
        "peer_errors": {} if stock_error is None else {STOCK: float(f"{stock_error:.2g}")},
        "peer_refusals": {STOCK: calls.stock_refusal} if calls.stock_refusal else {},
    }


def _sample(runners: dict[str, Callable[[int], None]], count: int, seconds: float) -> dict[str, float]:
    """Median us of each, called by turns, the order turned about each round, with 0, 1, ..., count - 1 and again."""
    samples: dict[str, list[float]] = {name: [] for name in runners}
    end, done = time.perf_counter() + seconds, 0
    while done < MIN_ROUNDS or (done < MAX_ROUNDS and time.perf_counter() < end):
        for name in list(runners)[:: -1 if done % 2 else 1]:
            start = time.perf_counter()
            runners[name](done % count)
            samples[name].append(time.perf_counter() - start)
        done += 1
    return {name: round(1e6 * statistics.median(times), 1) for name, times in samples.items()}


class _Calls:
    """The calls of one work on `count` sets of distinct caches, ours in pages of random order, stock's contiguous.

    Both append the same new token to every sequence, at each call anew.
    """

    def __init__(self, work: Work, threads: int) -> None:
        self.work, self._threads = work, threads
        self.count = work.set_count
        rng = np.random.default_rng(7)
        sequences, width = (
            self.count * work.batch,
            work.head_size * work.cache.bits // (8 * np.dtype(work.cache.stored).itemsize),
        )
        shape = (sequences, work.kv_num_heads, work.context, width)
        numbers = _numbers(work.cache, rng)
        contiguous = [np.resize(rng.permutation(numbers), shape) for _ in range(2)]
        pages = -(-work.context // work.block_size)
        self._table = rng.permutation(sequences * pages).astype(np.int32).reshape(sequences, pages)
        self._pools = [self._paged(cache, pages) for cache in contiguous]
        # (count, batch, G, context, width)
        self.contiguous = [cache.reshape(self.count, work.batch, *shape[1:]) for cache in contiguous]
        tokens = {"query": work.num_heads, "key": work.kv_num_heads, "value": work.kv_num_heads}
        self._new = {
            name: rng.standard_normal((work.batch, heads * work.head_size)).astype(work.cache.query)
            for name, heads in tokens.items()
        }
        self._attributes: dict[str, Any] = {"num_heads": work.num_heads, "kv_num_heads": work.kv_num_heads}
        self._scales: dict[str, np.ndarray] = {}
        if work.cache.stored is not work.cache.query:
            self._attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
            self._scales = {name: np.array([_scale(work.cache)]) for name in ("k_scale", "v_scale")}
        self.ours_output = np.empty_like(self._new["query"])
        self.stock_output = np.empty((work.batch, 1, work.num_heads * work.head_size), work.cache.query)
        self.stock_refusal = ""
        self.run_stock = self._bind_stock()

    def run_ours(self, index: int) -> None:
        from .attention import paged_attention

        work = self.work
        packed = {"k_cache_dtype": "int4", "v_cache_dtype": "int4"} if work.cache.bits == 4 else {}
        paged_attention(
            *self._new.values(),
            *self._pools,
            np.arange(work.batch + 1, dtype=np.int32),
            np.full(work.batch, work.context - 1, np.int32),
            self._table[index * work.batch : (index + 1) * work.batch],
            **self._attributes,
            **self._scales,
            **packed,
            output=self.ours_output,
            threads=self._threads,
        )

    def verify(self) -> tuple[float, float | None]:
        """Relative errors of ours and of stock, of the first sequence against float64.

        The first and the last set's other sequences are compared with stock's, and must be finite where it is missing.
        Raises OctavoError where one is wrong.
        """
        errors = []
        for index in dict.fromkeys((self.count - 1, 0)):
            self.ours_output.fill(np.nan)
            self.run_ours(index)
            if not np.isfinite(self.ours_output.astype(np.float32)).all():
                raise OctavoError(f"{self.work.name}: octavo's output is not finite; report this.")
            if self.run_stock is not None:
                self.stock_output.fill(np.nan)
                self.run_stock(index)
                pairs = zip(self.ours_output, self.stock_output, strict=True)
                errors.append(max(_relative_error(ours, stock) for ours, stock in pairs))
        exact = self._exact()  # over the new token too, which the calls have written
        ours, stock = _relative_error(self.ours_output[0], exact), None
        if not ours <= self.work.cache.bound:
            raise OctavoError(f"{self.work.name}: octavo is off by {ours:.2g} from float64; report this.")
        if self.run_stock is not None:
            stock = _relative_error(self.stock_output[0], exact)
            if not stock <= STOCK_BOUND:
                raise OctavoError(f"{self.work.name}: {STOCK} is off by {stock:.2g} from float64; report this.")
        for apart in errors:
            if not apart <= self.work.cache.bound + STOCK_BOUND:
                raise OctavoError(f"{self.work.name}: octavo is off by {apart:.2g} from {STOCK}; report this.")
        return ours, stock

    def _paged(self, cache: np.ndarray, pages: int) -> np.ndarray:
        """A pool (blocks, block_size, G, width) that holds the sequences of `cache` by the table."""
        sequences, heads, context, width = cache.shape
        pool = np.zeros((sequences * pages, self.work.block_size, heads, width), cache.dtype)
        padded = np.zeros((pages * self.work.block_size, heads, width), cache.dtype)
        for sequence in range(sequences):
            padded[:context] = cache[sequence].swapaxes(0, 1)
            pool[self._table[sequence]] = padded.reshape(pages, self.work.block_size, heads, width)
        return pool

    def _exact(self) -> np.ndarray:
        """Attention in float64 of the first sequence, over what the pages hold of it: (N*H)."""
        work, group = self.work, self.work.num_heads // self.work.kv_num_heads
        key, value = (
            _decoded(work.cache, pool[self._table[0]].reshape(-1, *pool.shape[2:])[: work.context])
            for pool in self._pools
        )
        query = self._new["query"][0].astype(np.float64).reshape(work.kv_num_heads, group, work.head_size)
        scores = np.einsum("ghd,tgd->ght", query, key, optimize=True) / np.sqrt(work.head_size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("ght,tgd->ghd", weights, value, optimize=True).reshape(-1)

    def _bind_stock(self) -> Callable[[int], None] | None:
        """None where this onnxruntime has no kernel for the work: stock_refusal then has its words."""
        import onnxruntime as ort
        from onnx import helper
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        work = self.work
        attributes = dict(self._attributes)
        if self._scales:
            attributes["kv_cache_bit_width"] = work.cache.bits
        fixed = {
            **{name: values.reshape(work.batch, 1, -1) for name, values in self._new.items()},
            "seqlens_k": np.full(work.batch, work.context - 1, np.int32),
            "total_sequence_length": np.array([work.context], np.int32),
            **self._scales,
        }
        names = (*self._new, "past_key", "past_value", "seqlens_k", "total_sequence_length", *[""] * 5, *self._scales)
        listed = list(names)
        while not listed[-1]:
            listed.pop()
        caches = dict(zip(("past_key", "past_value"), (cache[0] for cache in self.contiguous), strict=True))
        made = {"output": self.stock_output, "present_key": caches["past_key"], "present_value": caches["past_value"]}
        node = helper.make_node("GroupQueryAttention", listed, list(made), domain="com.microsoft", **attributes)

        def described(values: dict[str, np.ndarray]) -> list[Any]:
            return [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in values.items()
            ]

        graph = helper.make_graph([node], "stock", described(fixed | caches), described(made))
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._threads
        options.add_session_config_entry("session.force_spinning_stop", "1")  # the others' turn is next
        try:
            session = ort.InferenceSession(
                helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
            )
        except (state.NotImplemented, state.InvalidGraph, state.Fail) as error:
            self.stock_refusal = first_line(error)
            return None

        def bound(index: int) -> Any:
            binding = session.io_binding()
            sides = [cache[index] for cache in self.contiguous]
            inputs = fixed | dict(zip(("past_key", "past_value"), sides, strict=True))
            outputs = {"output": self.stock_output, "present_key": sides[0], "present_value": sides[1]}
            for values, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
                for name, array in values.items():
                    element = helper.np_dtype_to_tensor_dtype(array.dtype)
                    bind(name, "cpu", 0, element, list(array.shape), array.ctypes.data)
            return binding

        bindings = [bound(index) for index in range(self.count)]
        self._kept = fixed
        return lambda index: session.run_with_iobinding(bindings[index])


def _numbers(cache: CacheType, rng: np.random.Generator) -> np.ndarray:
    """About a million elements as a cache stores them, of an odd count so that no period of theirs fits a row."""
    values = rng.standard_normal((1 << 20) - 1).astype(np.float32)
    if cache.bits == 4:
        return rng.integers(0, 256, values.size, dtype=np.uint8)
    return (
        np.clip(values / _scale(cache), -127, 127).astype(cache.stored)
        if cache.bits == 8
        else values.astype(cache.stored)
    )


def _scale(cache: CacheType) -> np.float32:
    return np.float32(0.4) if cache.bits == 4 else SCALE if cache.bits == 8 else np.float32(1)


def _decoded(cache: CacheType, stored: np.ndarray) -> np.ndarray:
    """float64 (..., head_size)."""
    if cache.bits == 4:
        stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1).astype(np.int8) - 8
    return stored.astype(np.float64) * np.float64(_scale(cache))


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the 2-norm; NaN where `actual` has one."""
    wanted = expected.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(actual.astype(np.float64).reshape(-1) - wanted) / np.linalg.norm(wanted))


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raises OctavoError where `draw` could not write `path`: to be called before minutes of measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OctavoError(NO_MATPLOTLIB)
    try:
        file = Path(os.path.realpath(path))  # of a link that leads nowhere, not the link is made and taken away again
        if file.exists() and not file.is_file() and not file.is_dir():
            return  # a device or a pipe, which opening would disturb
        existed = file.exists()
        file.open("ab").close()
        if not existed:
            file.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise OctavoError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def draw(report: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the rows as PNG: the share of the plain read's rate that octavo and the peer reach.

    Raises OctavoError where matplotlib is not installed or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise OctavoError(NO_MATPLOTLIB) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.3 * len(rows)))
    at = range(len(rows))
    axes.barh(at, [row["percent_of_limit"] for row in rows], height=0.6, color="#3b6ea8", label="octavo", zorder=2)
    peers = [(100 * row["floor_us"] / row["bar_us"], i) for i, row in enumerate(rows) if row["bar_us"]]
    if peers:
        axes.scatter(*zip(*peers, strict=True), marker="D", s=24, color="#b8432f", label=STOCK, zorder=3)
    axes.axvline(100, color="black", linewidth=1, label="floor: plain read", zorder=1)
    axes.set_yticks(list(at), [row["work"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("% of the rate of a plain read of K and V", fontsize=9)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    figure.suptitle(f"Decode on {report['device']}, {report['date']}, {report['version']}", fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=100, format="png")
    except OSError as error:
        raise OctavoError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        pyplot.close(figure)


def _device() -> str:
    cores = processors.processor_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {cores} cores"


def _version() -> str:
    from . import __version__

    return f"octavo {__version__}"


def _onnxruntime_version() -> str:
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"
