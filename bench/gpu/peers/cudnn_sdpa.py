"""cuDNN's paged SDPA through nvidia-cudnn-frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from work import Work

from peers import harness

try:
    import cudnn
except ImportError as error:
    harness.absent(f"nvidia-cudnn-frontend: {error}")

ERROR = {"fp16": 1e-3, "bf16": 5e-3}


def build(
    work: Work, ring: harness.Ring, query: torch.Tensor, output: torch.Tensor, handle: Any
) -> Callable[[int], None]:
    """run(i) for cudnn's graph over the i-th cache."""
    kind = {"fp16": cudnn.data_type.HALF, "bf16": cudnn.data_type.BFLOAT16}[work.cache]
    batch, new, page, pages = len(work.lengths), work.new_tokens, work.page, ring.pages
    heads, kv_heads, size = work.num_heads, work.kv_num_heads, work.head_size
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    rows = {"dim": [batch, heads, new, size], "stride": [new * heads * size, size, heads * size, 1]}
    pool = {"dim": [pages, kv_heads, page, size], "stride": [page * kv_heads * size, size, kv_heads * size, 1]}
    table = {"dim": [batch, 1, ring.columns, 1], "stride": [ring.columns, ring.columns, 1, 1]}
    one = {"dim": [batch, 1, 1, 1], "stride": [1, 1, 1, 1]}
    int32 = cudnn.data_type.INT32
    q = graph.tensor(name="q", data_type=kind, **rows)
    k, v = (graph.tensor(name=name, data_type=kind, **pool) for name in ("k", "v"))
    k_table, v_table = (graph.tensor(name=name, data_type=int32, **table) for name in ("k_table", "v_table"))
    q_lengths, kv_lengths = (graph.tensor(name=name, data_type=int32, **one) for name in ("q_lengths", "kv_lengths"))
    out, _ = graph.sdpa(
        name="sdpa",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=size**-0.5,
        use_padding_mask=True,
        seq_len_q=q_lengths,
        seq_len_kv=kv_lengths,
        paged_attention_k_table=k_table,
        paged_attention_v_table=v_table,
        paged_attention_max_seq_len_kv=max(work.lengths),
        **({"use_causal_mask_bottom_right": True} if new > 1 else {}),
    )
    out.set_output(True).set_dim(rows["dim"]).set_stride(rows["stride"]).set_data_type(kind)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    news = torch.full((batch, 1, 1, 1), new, dtype=torch.int32, device="cuda")
    lengths = ring.lengths.view(batch, 1, 1, 1)

    def run(i: int) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        pages_of = ring.tables[i].view(batch, 1, ring.columns, 1)
        tensors = {q: query, k: ring.k, v: ring.v, k_table: pages_of, v_table: pages_of}
        graph.execute({**tensors, q_lengths: news, kv_lengths: lengths, out: output}, workspace, handle=handle)

    return run


def main() -> None:
    options = harness.options()
    handle = cudnn.create_handle()

    def measure(work: Work) -> dict[str, Any]:
        if work.cache not in ERROR:
            raise harness.Refusal(f"no {work.cache} cache")
        if work.softcap or work.window > 0:
            raise harness.Refusal("softcap and windows are not asked of it here")
        ring = harness.Ring(work)
        shape = (len(work.lengths) * work.new_tokens, work.num_heads, work.head_size)
        query = torch.randn(shape, device="cuda", dtype=harness.TORCH_TYPES[work.cache])
        output = torch.empty_like(query)
        run = build(work, ring, query, output, handle)
        one = torch.tensor(1.0, device="cuda")
        error = harness.check(work, ring, query, output, run, (one, one), ERROR[work.cache])
        return {"us": {"cuDNN": round(harness.time_ring(ring, run), 2)}, "error": error}

    version = f"cuDNN {cudnn.backend_version()}, frontend {cudnn.__version__}"
    harness.run_all("cuDNN", version, options.works, measure, options.json)


if __name__ == "__main__":
    main()
