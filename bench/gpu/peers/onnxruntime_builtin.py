"""The built-in com.microsoft::PagedAttention of onnxruntime-gpu.

A model of many nodes over a ring of caches. The whole call is timed by replaying the session's CUDA graph; attention
alone by the durations of its kernels (torch's profiler sees every kernel of the process) in a run without a graph, gaps
left out: that favours it.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import numpy as np
import torch
from work import Work

from peers import harness

try:
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper
except ImportError as error:
    harness.absent(str(error))

ONNX_TYPES = {
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.UINT8,
}
ERROR = {"fp16": 1.5e-3, "bf16": 8e-3}
# Kernels that prepare lengths and tables, append K and V, or fold scales.
APPEND = re.compile(
    r"append|reshape|seqlens|rotary|unpack|fold|fill|memset|memcpy|copy|table|prepare",
    re.IGNORECASE,
)
NODE_BUDGET_US = 2000.0  # a replay is at least this long, so that its launch does not count


def node_count(work: Work, caches: int) -> int:
    """Nodes of the model: a multiple of `caches`."""
    expected_us = max(12.0, work.bytes / 3e6)
    wanted = max(harness.MIN_CALLS, min(96, int(NODE_BUDGET_US / expected_us)))
    return -(-wanted // caches) * caches


def make_model(work: Work, caches: int, nodes: int) -> bytes:
    """`nodes` PagedAttention nodes that share all inputs but the block table, one for each of `caches`."""
    optional = ["k_scale", "v_scale"] if work.cache not in ("fp16", "bf16") else []
    t, stored = ONNX_TYPES[work.q_type], ONNX_TYPES[work.cache]
    types = {"query": t, "key": t, "value": t, "key_cache": stored, "value_cache": stored}
    types |= dict.fromkeys(("cumulative", "past", "metadata"), TensorProto.INT32)
    types |= {f"table{i}": TensorProto.INT32 for i in range(caches)}
    types |= dict.fromkeys(optional, TensorProto.FLOAT)
    attributes: dict[str, Any] = {"num_heads": work.num_heads, "kv_num_heads": work.kv_num_heads}
    if work.softcap:
        attributes["softcap"] = float(work.softcap)
    if work.window > 0:
        attributes["local_window_size"] = work.window
    if optional:
        kind = "PER_CHANNEL" if work.per_channel else "PER_TENSOR"
        attributes |= {"k_quant_type": kind, "v_quant_type": kind}
    if work.cache == "int4":
        attributes |= {"k_cache_dtype": "int4", "v_cache_dtype": "int4"}

    def rank(name: str) -> int:
        if name.endswith("_scale"):
            return 3 if work.per_channel else 1
        return 4 if name.endswith("_cache") else 1 if name in ("cumulative", "past", "metadata") else 2

    shared = ["query", "key", "value", "key_cache", "value_cache", "cumulative", "past"]
    graph_nodes = []
    for i in range(nodes):
        inputs = [*shared, f"table{i % caches}", "", "", "", "", "", "", *(optional or ["", ""]), "metadata"]
        graph_nodes.append(
            helper.make_node(
                "PagedAttention", inputs, [f"output{i}"], f"layer{i}", domain="com.microsoft", **attributes
            )
        )
    graph = helper.make_graph(
        graph_nodes,
        "decode",
        [helper.make_tensor_value_info(name, kind, [None] * rank(name)) for name, kind in types.items()],
        [helper.make_tensor_value_info(f"output{i}", t, [None, None]) for i in range(nodes)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def kernel_us(profile: Any) -> dict[str, float]:
    """Microseconds of each kernel (and copy) that the profiler saw, summed by name."""
    sums: dict[str, float] = collections.defaultdict(float)
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            sums[event.name()] += event.duration_ns() / 1000
    return dict(sums)


def is_attention(name: str) -> bool:
    """Whether a kernel of this name computes attention or merges its parts."""
    return not APPEND.search(name.split("<")[0].split("(")[0])


class Session:
    """A session over a ring, with everything bound."""

    def __init__(self, work: Work) -> None:
        self.ring = ring = harness.Ring(work)
        self.nodes = node_count(work, len(ring.tables))
        batch, new = len(work.lengths), work.new_tokens
        tokens, t = batch * new, harness.TORCH_TYPES[work.q_type]
        self.stream = torch.cuda.Stream()
        provider = {"device_id": "0", "enable_cuda_graph": "1", "user_compute_stream": str(self.stream.cuda_stream)}
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            make_model(work, len(ring.tables), self.nodes), settings, [("CUDAExecutionProvider", provider)]
        )
        self.query = torch.randn(tokens, work.num_heads * work.head_size, device="cuda", dtype=t)
        self.output = torch.empty(self.nodes, tokens, work.num_heads * work.head_size, device="cuda", dtype=t)
        kv = [torch.randn(tokens, work.kv_num_heads * work.head_size, device="cuda", dtype=t) for _ in range(2)]
        lengths = ring.lengths
        cumulative = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
        inputs = {"query": self.query, "key": kv[0], "value": kv[1], "key_cache": ring.k, "value_cache": ring.v}
        inputs |= {"cumulative": cumulative, "past": lengths - new}
        inputs |= {f"table{i}": table for i, table in enumerate(ring.tables)}
        one = torch.tensor(1.0, device="cuda")
        self.scales = (one, one)
        if work.cache in harness.CODE_SCALE:
            shape = (work.kv_num_heads, 1, work.head_size) if work.per_channel else (1,)
            made = [harness.CODE_SCALE[work.cache] * (0.75 + 0.5 * torch.rand(shape, device="cuda")) for _ in range(2)]
            inputs |= {"k_scale": made[0], "v_scale": made[1]}
            self.scales = tuple(s[:, 0] if work.per_channel else s[0] for s in made)
        self.inputs = inputs  # what is bound must live
        types = {torch.int32: TensorProto.INT32, torch.float32: TensorProto.FLOAT}
        types |= {torch_type: ONNX_TYPES[name] for name, torch_type in harness.TORCH_TYPES.items()}
        self.binding = self.session.io_binding()
        for name, tensor in inputs.items():
            self.binding.bind_input(name, "cuda", 0, types[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self.binding.bind_cpu_input("metadata", np.array([new, max(work.lengths)], np.int32))
        for i in range(self.nodes):
            row = self.output[i]
            self.binding.bind_output(f"output{i}", "cuda", 0, types[t], tuple(row.shape), row.data_ptr())
        self.options = onnxruntime.RunOptions()
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(self) -> None:
        """All nodes once: the first runs plain, later ones as replays of the CUDA graph."""
        self.session.run_with_iobinding(self.binding, self.options)


def measure(work: Work) -> dict[str, Any]:
    """One row."""
    session = Session(work)
    torch.cuda.synchronize()
    with torch.cuda.stream(session.stream):
        session.run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            session.run()
            torch.cuda.synchronize()
        kernels = kernel_us(profile)
        attention = sum(us for name, us in kernels.items() if is_attention(name)) / session.nodes

        def run(i: int) -> None:  # node i has cache i
            session.output.fill_(float("nan"))
            session.run()
            checked.copy_(session.output[i].view(checked.shape))

        shape = (len(work.lengths) * work.new_tokens, work.num_heads, work.head_size)
        checked = torch.empty(shape, device="cuda", dtype=session.output.dtype)
        error = harness.check(
            work, session.ring, session.query.view(shape), checked, run, session.scales, ERROR[work.q_type]
        )
        us = {"onnxruntime (call)": round(harness.median_us(session.run, session.nodes), 2)}
    if attention > 0:
        us["onnxruntime"] = round(attention, 2)
    listed = {name[:120]: round(time / session.nodes, 2) for name, time in kernels.items()}
    return {"us": us, "error": error, "kernels": dict(sorted(listed.items(), key=lambda item: -item[1])[:12])}


def main() -> None:
    options = harness.options()
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        harness.absent(f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider")
    version = f"onnxruntime-gpu {onnxruntime.__version__}, onnx {onnx.__version__}"
    harness.run_all("onnxruntime", version, options.works, measure, options.json)


if __name__ == "__main__":
    main()
