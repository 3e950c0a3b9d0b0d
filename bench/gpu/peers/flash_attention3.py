"""FlashAttention-3 with a paged cache, in vLLM's build: `_vllm_fa3_C.abi3.so` of --library or of an installed vllm.

8-bit caches are read with Q in fp8 too, the only way it has: the peer is then named "FA3 (Q in fp8)".
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from work import Work

from peers import harness

LIBRARY = "_vllm_fa3_C.abi3.so"
FP8_ERROR = 6e-2  # Q, K and P of 3 mantissa bits
ERROR = {"fp16": 1e-3, "bf16": 5e-3}


def find_library(folder: Path | None) -> Path | None:
    """The library in `folder`, or in an installed vllm."""
    folders = [folder] if folder else []
    spec = importlib.util.find_spec("vllm")
    if spec and spec.submodule_search_locations:
        folders += [Path(place) / "vllm_flash_attn" for place in spec.submodule_search_locations]
    return next((place / LIBRARY for place in folders if (place / LIBRARY).is_file()), None)


def measure(work: Work) -> dict[str, Any]:
    """One row."""
    if work.cache in ("int8", "int4") or work.per_channel:
        raise harness.Refusal(f"no {work.cache} cache{' with PER_CHANNEL scales' if work.per_channel else ''}")
    ops = torch.ops._vllm_fa3_C
    fp8 = work.cache == "fp8"
    if fp8 and work.q_type == "bf16":
        raise harness.Refusal("Q in fp8 whatever the model's type: the row of fp16 Q stands for both")
    output_type = torch.bfloat16 if fp8 else harness.TORCH_TYPES[work.cache]
    ring = harness.Ring(work)
    batch, new, longest = len(work.lengths), work.new_tokens, max(work.lengths)
    shape = (batch * new, work.num_heads, work.head_size)
    query = torch.randn(shape, device="cuda").to(harness.TORCH_TYPES[work.cache])
    output = torch.empty(shape, device="cuda", dtype=output_type)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
    scales = torch.full((batch, work.kv_num_heads), 0.9, device="cuda") if fp8 else None
    q_scale = torch.ones(batch, work.kv_num_heads, device="cuda") if fp8 else None
    window = (work.window - 1, 0) if work.window > 0 else (-1, -1)
    metadata = ops.get_scheduler_metadata(
        batch, new, longest, work.num_heads, work.kv_num_heads, work.head_size, work.head_size, query.dtype,
        ring.lengths, starts, None, None, None, None, work.page, 0, True, *window, bool(work.softcap), 0, None, 0,
    )  # fmt: skip

    def run(i: int) -> None:
        ops.fwd(
            query, ring.k, ring.v, None, None, None, output, starts, None, None, None, ring.lengths, new, longest,
            ring.tables[i], None, None, None, None, None, q_scale, scales, scales, work.head_size**-0.5, True, *window,
            float(work.softcap), True, metadata, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip

    factor = torch.tensor(0.9 if fp8 else 1.0, device="cuda")
    bound = FP8_ERROR if fp8 else ERROR[work.cache]
    error = harness.check(work, ring, query, output, run, (factor, factor), bound)
    return {"us": {"FA3 (Q in fp8)" if fp8 else "FA3": round(harness.time_ring(ring, run), 2)}, "error": error}


def main() -> None:
    options = harness.options()
    library = find_library(options.library)
    if library is None:
        harness.absent(f"{LIBRARY} is neither in --library nor in an installed vllm")
    torch.ops.load_library(str(library))
    harness.run_all("FlashAttention-3", "vLLM's build", options.works, measure, options.json)


if __name__ == "__main__":
    main()
