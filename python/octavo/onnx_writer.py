"""An ONNX model written while it is built: nodes stay in memory, weights go straight to the external data file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 21
IR_VERSION = 10
ALIGNMENT = 4096  # of every weight in the data file, so that a runtime can map it
INLINE_BYTES = 1024  # smaller tensors stay in the .onnx file

_ELEMENT_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}


class OnnxWriter:
    """Builds model.onnx and model.onnx.data in `folder`. Values are named by strings; "" is an absent input."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = open(folder / "model.onnx.data", "wb")  # noqa: SIM115 (close() and finish() close it)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        # (address, bytes) of arrays to store once -> their place in the data file, None before the first use
        self._shared: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._kept: list[np.ndarray] = []  # keeps those addresses valid

    def close(self) -> None:
        self._data.close()

    def input(self, name: str, element_type: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, element_type, shape))
        return name

    def output(self, name: str, element_type: int, shape: Sequence[int | str]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, element_type, shape))
        return name

    def node(
        self, op: str, inputs: Sequence[str], outputs: str | Sequence[str], domain: str = "", **attributes: Any
    ) -> str:
        """Adds a node named after its first output, and returns that output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        self._nodes.append(helper.make_node(op, list(inputs), names, name=names[0], domain=domain, **attributes))
        return names[0]

    def share(self, values: np.ndarray) -> None:
        """Constants made of this very memory, in whatever shape, are stored once. The array is kept until the end."""
        self._kept.append(values)
        self._shared[_memory(values)] = None

    def constant(self, name: str, values: np.ndarray) -> str:
        """Adds an initializer, once for each name."""
        if name in self._names:
            return name
        self._names.add(name)
        values = np.ascontiguousarray(values)
        tensor = TensorProto(name=name, data_type=_ELEMENT_TYPES[values.dtype], dims=values.shape)
        if values.nbytes <= INLINE_BYTES:
            tensor.raw_data = values.tobytes()
        else:
            offset, count = self._shared.get(_memory(values)) or self._store(values)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "model.onnx.data"), ("offset", offset), ("length", count)):
                tensor.external_data.add(key=key, value=str(value))
        self._initializers.append(tensor)
        return name

    def finish(self, producer_version: str) -> None:
        """Writes model.onnx and closes both files."""
        graph = helper.make_graph(self._nodes, "octavo_paged", self._inputs, self._outputs, self._initializers)
        model = helper.make_model(
            graph,
            producer_name="octavo",
            producer_version=producer_version,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        )
        self._data.close()
        (self._folder / "model.onnx").write_bytes(model.SerializeToString())

    def _store(self, values: np.ndarray) -> tuple[int, int]:
        self._data.write(b"\0" * (-self._data.tell() % ALIGNMENT))
        place = (self._data.tell(), values.nbytes)
        self._data.write(values.data)
        if _memory(values) in self._shared:
            self._shared[_memory(values)] = place
        return place


def _memory(values: np.ndarray) -> tuple[int, int]:
    return values.__array_interface__["data"][0], values.nbytes
