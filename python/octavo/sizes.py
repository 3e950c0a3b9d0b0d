"""What a paged model takes in memory, and what one decode step of it reads and writes: estimates from its graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from .errors import OctavoError, counted
from .onnx_model import OnnxModel, PagedNode

DEFAULT_CONTEXT = 4096  # where the graph does not limit positions
DEFAULT_BLOCK_SIZE = 16  # where it does not tell
_READS_ROWS = ("Gather", "GatherBlockQuantized", "PagedAttention")  # of their initializers: a row or two a token
_EXPERTS = ("MoE", "QMoE")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model, and of a decode step of `batch` sequences that hold `context` tokens each.

    weights: in the file. cache_token: K and V of one token in all layers; cache_sequence: of one sequence.
    weights_read: every matrix once; of mixtures, the share of experts that `batch` tokens choose at most.
    cache_read: K and V inside each layer's window. cache_written: the step's own tokens.
    """

    context: int
    batch: int
    weights: int
    cache_token: int
    cache_sequence: int
    weights_read: int
    cache_read: int
    cache_written: int

    def as_json(self) -> dict[str, Any]:
        return {
            "weights_bytes": self.weights,
            "cache_bytes_per_token": self.cache_token,
            "context": self.context,
            "cache_bytes_per_sequence": self.cache_sequence,
            "decode_step": {
                "batch": self.batch,
                "weights_bytes_read": self.weights_read,
                "cache_bytes_read": self.cache_read,
                "cache_bytes_written": self.cache_written,
            },
        }

    def text(self) -> str:
        step = f"decode of {counted(self.batch, 'sequence')} at {counted(self.context, 'token')}"
        read = self.weights_read + self.cache_read
        return "\n".join(
            [
                f"  weights     {shown_bytes(self.weights)}",
                f"  cache       {self.cache_token:,} bytes a token in all layers, "
                f"{shown_bytes(self.cache_sequence)} a sequence of {counted(self.context, 'token')}",
                f"  a step      ({step}, estimated) reads {shown_bytes(read)}: "
                f"{shown_bytes(self.weights_read)} of weights, {shown_bytes(self.cache_read)} of cache; "
                f"writes {shown_bytes(self.cache_written)} of cache",
            ]
        )


def measure(model: OnnxModel, context: int | None = None, batch: int = 1) -> Sizes:
    """Sizes of a model.

    Args:
        context: tokens of each sequence, the one being decoded included; None = as many as the graph's RoPE tables
            reach, or DEFAULT_CONTEXT.
        batch: sequences that decode at once.

    Raises OctavoError where the graph does not tell a cache's size.
    """
    context = context or _longest_context(model)
    token = sequence = read = 0
    seen = set()
    for node in model.nodes:
        # Branches of an If take the caches of one layer, and one of them runs.
        caches = tuple(node.inputs.get(name) for name in ("key_cache", "value_cache"))
        if node.prefix and caches in seen:
            continue
        seen.add(caches)
        row = token_bytes(model, node)
        if row is None:
            raise OctavoError(f"{node.name}: the graph does not tell the sizes of its caches.")
        block = _block_size(model, node)
        window = node.attributes.get("local_window_size", -1)
        token += row
        sequence += row * -(-context // block) * block
        read += row * (min(context, window) if isinstance(window, int) and window > 0 else context)
    return Sizes(
        context=context,
        batch=batch,
        weights=sum({weight.place: weight.byte_count for weight in model.weights.values()}.values()),
        cache_token=token,
        cache_sequence=sequence,
        weights_read=_weights_read(model, batch),
        cache_read=batch * read,
        cache_written=batch * token,
    )


def token_bytes(model: OnnxModel, node: PagedNode) -> int | None:
    """Bytes of one token's K and V in one node's caches; None where the graph does not tell them."""
    total = 0
    for name in ("key_cache", "value_cache"):
        if name not in node.inputs:
            continue  # LATENT has no value_cache
        cache = model.type_of(node.inputs[name])
        if cache is None or cache.shape is None or cache.element_type not in helper.get_all_tensor_dtypes():
            return None
        sizes = [size for size in cache.shape[2:] if isinstance(size, int)]
        if len(sizes) != 2:
            return None
        total += math.prod(sizes) * np.dtype(helper.tensor_dtype_to_np_dtype(cache.element_type)).itemsize
    return total or None


def shown_bytes(count: int) -> str:
    """ "512 bytes", "1.5 KiB", "217.3 MiB", "1.2 GiB"."""
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def _longest_context(model: OnnxModel) -> int:
    tables = (model.type_of(node.inputs.get("cos_cache")) for node in model.nodes)
    rows = [table.shape[0] for table in tables if table is not None and table.shape]
    return min((count for count in rows if isinstance(count, int) and count > 0), default=DEFAULT_CONTEXT)


def _block_size(model: OnnxModel, node: PagedNode) -> int:
    cache = model.type_of(node.inputs["key_cache"])
    extent = cache.shape[1] if cache is not None and cache.shape else None
    return extent if isinstance(extent, int) and extent > 0 else DEFAULT_BLOCK_SIZE


def _weights_read(model: OnnxModel, batch: int) -> int:
    read: dict[Any, int] = {}
    for name, weight in model.weights.items():
        for user in model.users.get(name, []):
            if user.op_type in _READS_ROWS:
                continue
            share = 1.0
            if user.op_type in _EXPERTS and weight.dims and weight.dims[0] > 0:
                share = min(1.0, batch * max(user.experts_used, 0) / weight.dims[0])
            read[weight.place] = max(read.get(weight.place, 0), int(share * weight.byte_count))
    return sum(read.values())
