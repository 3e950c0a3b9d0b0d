"""Cases of tests/ort on a GPU: sessions of the CUDA provider, tensors in device memory, and the comparison."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import onnx
import onnxruntime
import reference
from bounds import error_bounds
from onnxruntime import OrtValue
from support import ONNX_TYPES, Case, assert_cache, assert_within, library_path, make_model

PROVIDER, DEVICE = "CUDAExecutionProvider", "cuda"
HOST_INPUTS = ("attention_metadata",)


@cache
def missing_device() -> str:
    """Why nothing here can run; empty where it can."""
    if PROVIDER not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} has no {PROVIDER}: install onnxruntime-gpu"
    try:
        OrtValue.ortvalue_from_numpy(np.zeros(1, np.uint8), DEVICE, 0)
    except Exception as error:
        return f"no usable device: {str(error).splitlines()[0][:200]}"
    return ""


def make_rng() -> tuple[np.random.Generator, int]:
    """A generator and the seed to repeat it with."""
    seed = int(os.environ.get("OCTAVO_TEST_SEED", np.random.SeedSequence().entropy % 2**32))
    return np.random.default_rng(seed), seed


def session_options(config: dict[str, str] | None = None, library: bool = True) -> onnxruntime.SessionOptions:
    """Options under which a node that the CUDA provider does not take is an error, with the library registered."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for key, value in {"session.disable_cpu_ep_fallback": "1", **(config or {})}.items():
        options.add_session_config_entry(key, value)
    if library:
        options.register_custom_ops_library(library_path())
    return options


def make_cuda_session(
    model: onnx.ModelProto,
    config: dict[str, str] | None = None,
    library: bool = True,
    provider: dict[str, str] | None = None,
) -> onnxruntime.InferenceSession:
    """A session whose every node runs on the GPU. `provider`: options of the CUDA provider."""
    options = session_options(config, library)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[(PROVIDER, provider or {})])


class DeviceArray:
    """A numpy array's copy on the device: bytes, so that every element type passes."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype, self.bytes = array.shape, array.dtype, array.nbytes
        self._value = OrtValue.ortvalue_from_numpy(self._bytes_of(array), DEVICE, 0)

    @property
    def pointer(self) -> int:
        return self._value.data_ptr()

    def write(self, array: np.ndarray) -> None:
        """Replaces the contents; the address stays."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        self._value.update_inplace(self._bytes_of(array))

    def read(self) -> np.ndarray:
        return self._value.numpy()[: self.bytes].view(self.dtype).reshape(self.shape)

    @staticmethod
    def _bytes_of(array: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return flat if flat.size else np.zeros(1, np.uint8)  # there is no empty device buffer


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """No value of a previous run, and no accidental zero, may look like a result."""
    return np.frombuffer(b"\x7f" * (int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


class DeviceCall:
    """A case with its tensors on the device, bound to a session. The cache outputs are the input buffers when
    `in_place`, else buffers of their own."""

    def __init__(self, session: onnxruntime.InferenceSession, case: Case, in_place: bool = True) -> None:
        self.session = session
        self.inputs = {n: DeviceArray(v) for n, v in case.inputs.items() if n not in HOST_INPUTS}
        self.host = {n: np.ascontiguousarray(v).copy() for n, v in case.inputs.items() if n in HOST_INPUTS}
        self.outputs: dict[str, DeviceArray] = {}
        self.binding = session.io_binding()
        for name, value in self.inputs.items():
            onnx_type = ONNX_TYPES[value.dtype]
            self.binding.bind_input(name, DEVICE, 0, onnx_type, list(value.shape), value.pointer)
        for name, value in self.host.items():
            self.binding.bind_input(name, "cpu", 0, ONNX_TYPES[value.dtype], list(value.shape), value.ctypes.data)
        shapes = case.output_shapes()
        for output in session.get_outputs():
            shape, dtype = shapes.get(output.name, shapes["output"])  # a model of several nodes numbers its outputs
            cache_input = self.inputs.get(output.name.removesuffix("_out")) if in_place else None
            value = cache_input or DeviceArray(poisoned(shape, dtype))
            self.outputs[output.name] = value
            self.binding.bind_output(output.name, DEVICE, 0, ONNX_TYPES[dtype], list(shape), value.pointer)

    def run(self, options: onnxruntime.RunOptions | None = None) -> None:
        """One call; returns when the device is done."""
        self.session.run_with_iobinding(self.binding, options)

    def update(self, **inputs: np.ndarray) -> None:
        """New contents of inputs, of the same shapes, at the same addresses."""
        for name, value in inputs.items():
            if name in self.host:
                self.host[name][...] = value
            else:
                self.inputs[name].write(value)

    def results(self) -> dict[str, np.ndarray]:
        return {name: value.read() for name, value in self.outputs.items()}


def run_case(session: onnxruntime.InferenceSession, case: Case, in_place: bool = True) -> dict[str, np.ndarray]:
    """Runs the case on device copies of its inputs; returns the outputs, caches among them."""
    call = DeviceCall(session, case, in_place)
    call.run()
    for name, value in call.inputs.items():
        if not (in_place and name.endswith("_cache")):
            same = value.read().tobytes() == np.ascontiguousarray(case.inputs[name]).tobytes()
            assert same, f"input {name} was changed"
    results = call.results()
    for name in ("key_cache", "value_cache"):  # a node without cache outputs updates its inputs
        if name in call.inputs:
            results.setdefault(f"{name}_out", call.inputs[name].read())
    return results


def check(
    case: Case, session: onnxruntime.InferenceSession | None = None, in_place: bool = True
) -> dict[str, np.ndarray]:
    """Runs the case and compares every output with the oracle of tests/ort."""
    results = run_case(session or make_cuda_session(make_model(case)), case, in_place)
    compare(case, results)
    return results


def compare(case: Case, results: dict[str, np.ndarray]) -> None:
    """Outputs against the oracle; attention is judged on the caches that the operator wrote, so that a stored value on
    the other side of a tie is no error of the output."""
    a = reference.with_defaults(case.attributes)
    expected_caches = reference.updated_caches(case.inputs, case.attributes)
    caches: list[np.ndarray | None] = [None, None]
    for i, (name, short) in enumerate((("key_cache", "k"), ("value_cache", "v"))):
        if expected_caches[i] is None:
            continue
        caches[i] = results[f"{name}_out"]
        kind = reference.logical_type(caches[i], a[f"{short}_cache_dtype"])
        assert_cache(caches[i], expected_caches[i], case.inputs[name], kind, name)
    expected = reference.attend(case.inputs, case.attributes, *caches)
    bounds = error_bounds(case, *caches)
    assert_within(results["output"], expected["output"], bounds["output"], "output")
    if "output_qk" in results:
        assert_within(results["output_qk"], expected["output_qk"], bounds["output_qk"], "output_qk")
