"""The main job: SmolLM2 with 4-bit weights, ours against stock onnxruntime and llama.cpp, from one command.

  make build && .venv/bin/python bench/cpu/job.py --llama-python OTHER_VENV/bin/python

Converts the GGUF file that `make demo` uses, and measures prefill and decode at batch 1, 4 and 16, prompts of 128 and
1,024 tokens: octavo's engine (what `octavo generate` runs), the same nodes with GroupQueryAttention in the same
onnxruntime, and llama.cpp on the same file, by turns with equal threads. A rate is tokens a second of processor time of
all threads, so that a busy machine does not decide. Prints the table, and writes --output (JSON) with a PNG beside it.

llama.cpp is the package llama-cpp-python of the Python that --llama-python names; without it, its column is absent, and
the file says so. Exit status 1: numbers that do not agree. Bars that are missed are shown, no more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/cpu"))
sys.path.insert(0, str(ROOT / "bench/gpu"))  # before bench/cpu: both have a run.py, and commit() is the GPU's

import job_cells  # noqa: E402
import job_plot  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from job_cells import LLAMA, STOCK, Cell  # noqa: E402
from job_engine import EngineJob, outside_seconds  # noqa: E402
from job_sessions import PagedJob, StockJob, load_graph, to_stock  # noqa: E402
from machine import THREADS, Others, device  # noqa: E402
from run import commit  # noqa: E402

import octavo  # noqa: E402
from octavo import huge_pages  # noqa: E402
from octavo.convert import convert  # noqa: E402
from octavo.demo import find_model  # noqa: E402
from octavo.errors import counted  # noqa: E402
from octavo.graph import GraphOptions  # noqa: E402

NEW = 32  # decode steps
CACHES = ("float16", "float32", "int8")  # the first is what octavo convert makes
MIN_ROUNDS, MAX_ROUNDS = 3, 15
OUTSIDE_NEW = 128  # tokens of each answer
EXACT_BOUND = 1e-4  # relative: the same arithmetic in another order, float32, 30 layers
# Nats between the distributions after a prompt, against exact arithmetic: 8-bit activations cost 0.01 or so; a wrong
# position or mask costs far more than 0.1.
KL_BOUND = 0.1
MARGIN = 2.0  # logits: two that are nearer may change places when activations are rounded to 8 bits


class Llama:
    """The worker of job_llama.py in another Python."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        # OpenMP's workers sleep between their loops, as onnxruntime's do here: waiting would count as processor time.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [python, str(ROOT / "bench/cpu/job_llama.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.busy_s = 0.0  # processor time of the worker
        self.about = self._ask({"model": str(model), "threads": threads})

    @staticmethod
    def importable(python: str) -> bool:
        try:
            done = subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    def run(self, ids: np.ndarray, new: int, want_logits: bool = False) -> dict[str, Any]:
        done = self._ask({"ids": ids.tolist(), "new": new, "want_logits": want_logits})
        self.busy_s = done["busy_s"]
        return done

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's worker ended with code {self._process.wait()}")
        return json.loads(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="CELL", help="e.g. 128x4; default: all")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of every one alike; default {THREADS}")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure a cell; default 20")
    parser.add_argument("--kv-cache", choices=CACHES, default=CACHES[0], help="ours; stock has float32, llama.cpp fp16")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that imports llama_cpp")
    parser.add_argument("--no-outside", action="store_true", help="leave out the share outside ONNX Runtime")
    parser.add_argument("--commit", default="", help="what to record; default: the checkout's")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/job.json")
    return parser.parse_args()


def prompts(folder: Path, count: int, length: int) -> np.ndarray:
    """Token ids (count, length): the package's text from places that differ, each prompt's tokens its own."""
    import onnxruntime_genai as og

    text = (Path(octavo.__file__).parent / "texts/perplexity.txt").read_text(encoding="utf-8")
    ids = np.asarray(og.Tokenizer(og.Config(str(folder))).encode(text), np.int64)
    return np.stack([np.resize(np.roll(ids, -61 * i), length) for i in range(count)])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(logits: np.ndarray, exact: np.ndarray) -> float:
    """The largest Kullback-Leibler divergence of a row, in nats."""
    wanted, got = log_softmax(exact), log_softmax(logits)
    return float((np.exp(wanted) * (wanted - got)).sum(-1).max())


def verify(folder: Path, threads: int, ids: np.ndarray, llama: Llama | None) -> dict[str, float]:
    """How far the contenders' logits are from each other. Raises ValueError where that is too far.

    ids: two prompts or more. With exact arithmetic ours and stock's have to agree, after the prompts and a decode step
    later; with the 8-bit activations that are timed, and in llama.cpp, distributions have to be near those.
    """
    length, kinds = ids.shape[1] - 1, {"ours": PagedJob, STOCK: StockJob}

    def logits(kind: str, level: int, cache: str) -> np.ndarray:
        graph = load_graph(folder, level, cache)
        job = kinds[kind](graph if kind == "ours" else to_stock(graph), folder, threads, len(ids), length + 1)
        for row in range(len(ids)):
            after_prompt = job.feed(ids[row : row + 1, :-1], 0, row)
        del after_prompt
        return job.feed(ids[:, -1:], length).copy()

    exact = {kind: logits(kind, 1, "float32") for kind in kinds}
    apart = float(np.abs(exact["ours"] - exact[STOCK]).max() / np.abs(exact[STOCK]).max())
    if not apart <= EXACT_BOUND:
        raise ValueError(f"ours and stock are {apart:.2g} apart in exact arithmetic, more than {EXACT_BOUND:.0e}")
    found = {"exact_relative_error": float(f"{apart:.2g}")}
    measured = {kind: logits(kind, 4, "float32" if kind == STOCK else "") for kind in kinds}
    if llama is not None:
        measured[LLAMA] = np.array(llama.run(ids, 0, want_logits=True)["logits"], np.float32)
    for name, values in measured.items():
        kl = divergence(values, exact[STOCK])
        if not kl <= KL_BOUND:
            raise ValueError(f"{name} is {kl:.2g} nats from exact arithmetic, more than {KL_BOUND}")
        found[f"{name} KL"] = float(f"{kl:.2g}")
    return found


class CellBench:
    """Measures one cell. Every round makes sessions anew: where their memory lies is worth up to a tenth."""

    def __init__(self, cell: Cell, folder: Path, threads: int, ids: np.ndarray, llama: Llama | None) -> None:
        self._folder, self._threads, self._ids, self._llama = folder, threads, ids, llama
        self._capacity = cell.prompt + NEW + 1
        self.expected = np.empty((0, 0), np.float32)  # stock's logits after the prompts

    def measure(self, seconds: float) -> dict[str, dict[str, float]]:
        """Rates by phase and contender: medians over the rounds."""
        samples: dict[str, dict[str, list[float]]] = {phase: {} for phase in job_cells.PHASES}
        runners: dict[str, Callable[[], dict[str, float]]] = {STOCK: self._run_stock, "ours": self._run_ours}
        if self._llama is not None:
            runners[LLAMA] = self._run_llama
        end, done = time.perf_counter() + seconds, 0
        while done < MIN_ROUNDS or (done < MAX_ROUNDS and time.perf_counter() < end):
            order = list(runners)
            if done % 2 and done:  # the first round starts with stock, whose logits judge the others
                order.reverse()
            for name in order:
                for phase, rate in runners[name]().items():
                    samples[phase].setdefault(name, []).append(rate)
            done += 1
        return {phase: {n: statistics.median(r) for n, r in named.items()} for phase, named in samples.items()}

    def _rates(self, prefill_s: float, decode_s: float, decode_tokens: int) -> dict[str, float]:
        return {"prefill": self._ids.size / prefill_s, "decode": decode_tokens / decode_s}

    def _run_ours(self) -> dict[str, float]:
        engine = EngineJob(self._folder, self._threads, len(self._ids), self._capacity)
        engine.use_huge_pages()
        found = engine.measure(self._ids, NEW)
        self._check("ours", found["first_tokens"])
        return self._rates(found["prefill_s"], found["decode_s"], found["decode_tokens"])

    def _run_stock(self) -> dict[str, float]:
        """Prompts one after the other, which is quicker for stock than together: activations stay in the caches."""
        model = to_stock(load_graph(self._folder, cache="float32"))  # it has no other that needs no scales
        job = StockJob(model, self._folder, self._threads, len(self._ids), self._capacity)
        huge_pages.collapse()
        count, length = self._ids.shape
        start = time.process_time()
        logits = np.concatenate([job.feed(self._ids[i : i + 1], 0, i).copy() for i in range(count)])
        tokens = logits.argmax(-1)
        middle = time.process_time()
        if not self.expected.size:
            self.expected = logits
        for step in range(NEW):
            tokens = job.feed(tokens[:, None], length + step).argmax(-1)
        return self._rates(middle - start, time.process_time() - middle, count * NEW)

    def _run_llama(self) -> dict[str, float]:
        assert self._llama is not None
        found = self._llama.run(self._ids, NEW)
        self._check(LLAMA, [row[0] for row in found["tokens"]])
        return self._rates(found["prefill_s"], found["decode_s"], len(self._ids) * NEW)

    def _check(self, name: str, tokens: list[int]) -> None:
        """Whether the first tokens are stock's, or as good as."""
        best = self.expected.max(-1)
        chosen = self.expected[np.arange(len(tokens)), tokens]
        if not (worst := float((best - chosen).max())) <= MARGIN:
            raise ValueError(f"{name} chose a token that is {worst:.2g} logits below stock's")


def main() -> int:
    options = parse_arguments()
    cells = [cell for cell in job_cells.all_cells() if not options.only or cell.name in options.only]
    if not cells:
        print(f"no cell is called any of {options.only}", file=sys.stderr)
        return 1
    source = find_model()
    llama = Llama(options.llama_python, source, options.threads) if Llama.importable(options.llama_python) else None
    rows, outside = [], []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        convert(source, folder, GraphOptions(cache_type=options.kv_cache))
        try:
            verified = verify(folder, options.threads, prompts(folder, 2, 129), llama)
            for cell in cells:
                if sys.stderr.isatty():
                    print(f"\r{cell.name:<20}", end="", file=sys.stderr, flush=True)
                others, start, busy = Others(), time.perf_counter(), llama.busy_s if llama else 0.0
                ids = prompts(folder, cell.batch, cell.prompt)
                rates = CellBench(cell, folder, options.threads, ids, llama).measure(options.seconds)
                # llama.cpp's worker is a process of its own, whose time Others counts as somebody else's.
                worker = (llama.busy_s - busy if llama else 0.0) / (time.perf_counter() - start) / (os.cpu_count() or 1)
                facts = {"others_percent": round(100 * max(0.0, others.share() - worker), 1)}
                rows += [job_cells.evaluate(cell, phase, rates[phase], facts) for phase in job_cells.PHASES]
            for batch in [] if options.no_outside else job_cells.BATCHES:
                others = Others()
                ids = prompts(folder, batch, job_cells.PROMPTS[0])
                apart, whole = outside_seconds(folder, options.threads, ids, OUTSIDE_NEW)
                facts = {"others_percent": round(100 * others.share(), 1)}
                outside.append(job_cells.outside_row(batch, 100 * apart / whole, facts))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            if llama is not None:
                llama.close()
    absent = f"absent: {options.llama_python} does not import llama_cpp"
    report = {
        "commit": options.commit or commit(),
        "device": device(),
        "threads": options.threads,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "model": source.name,
        "kv_cache": {"octavo": options.kv_cache, STOCK: "float32", LLAMA: "float16"},
        "about_peers": {
            STOCK: {"version": f"onnxruntime {onnxruntime.__version__}"},
            LLAMA: {"version": "absent"} if llama is None else llama.about,
        },
        "verified": verified,
        "rows": rows,
        "outside": outside,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{report['device']}, {counted(options.threads, 'thread')}, onnxruntime {onnxruntime.__version__}; {verified}"
    )
    print(job_cells.format_table(report))
    if llama is None:
        print(f"llama.cpp {absent}", file=sys.stderr)
    try:
        job_plot.draw(report, options.output.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
