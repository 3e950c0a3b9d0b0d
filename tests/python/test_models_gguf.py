"""The GGUF reader. Risk: a damaged or hostile file ends in a traceback, a hang, a huge allocation or a wrong model."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import fuzz_gguf
import gguf
import numpy as np
import pytest
from models_support import Kind, TinyShape, quantised, write_tiny_gguf

from octavo.architectures import half_rotation_order, read_config, rope_caches
from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.gguf_reader import GGUFFile
from octavo.weights import Blockwise, load

FUZZ_CASES = 1500
U64_MAX = 2**64 - 1


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, TinyShape())
    return path


def refusal(path: Path) -> str:
    """The message with which reading `path` is refused."""
    with pytest.raises(OctavoError) as caught, GGUFFile(path) as file:
        read_config(file)
    return str(caught.value)


def test_reads_what_the_gguf_package_reads(tiny: Path) -> None:
    theirs = gguf.GGUFReader(tiny)
    with GGUFFile(tiny) as file:
        assert set(file.tensors) == {tensor.name for tensor in theirs.tensors}
        for tensor in theirs.tensors:
            assert file.tensor(tensor.name).shape == tuple(tensor.shape.tolist()[::-1])
            np.testing.assert_array_equal(file.dequantised(tensor.name), tensor.data)
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                value = file.metadata[key]
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "is not a GGUF file: it is empty."),
        (b"GG", "starts with b'GG'"),
        (b"PK\x03\x04 a zip", "not a GGUF file: it starts with b'PK\\x03\\x04' instead of b'GGUF'."),
        (b"version https://git-lfs", "git lfs pull"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, U64_MAX), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, U64_MAX, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 60_000, 0), "only 0 bytes are left"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, U64_MAX) + bytes(64), "bytes in a metadata key"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, U64_MAX) + bytes(64), "strings in metadata 'a'"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1) + bytes(64), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77) + bytes(64), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9) + bytes(64), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"t", 2, 2**33, 2**33, 0, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "multiple of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 999, 0), "unknown type 999"),
    ],
)
def test_damaged_headers_are_named(tmp_path: Path, start: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(start)
    assert words in refusal(path)


def test_every_truncation_is_refused(tiny: Path) -> None:
    data = tiny.read_bytes()
    with GGUFFile(tiny) as file:
        end = max(info.offset + info.byte_count for info in file.tensors.values())
    for length in [*range(400), *range(400, end, 997), end - 1]:
        tiny.write_bytes(data[:length])
        refusal(tiny)


def test_what_is_not_a_regular_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent")


def test_messages_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "esc.gguf"
    name = b"\x1b[2J\n" + b"x" * 5000
    header = struct.pack("<IQQQ", 3, 1, 0, len(name)) + name + struct.pack("<IQIQ", 1, 32, 999, 0)
    path.write_bytes(b"GGUF" + header)
    message = refusal(path)
    assert message.isprintable() and len(message) < 400


def _with_metadata(path: Path, **changes: object) -> None:
    """Rewrites `path`: key (dots as __) -> (method of GGUFWriter, value), or None to leave it out."""
    old = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    wanted = {key.replace("__", "."): change for key, change in changes.items()}
    for key, field in old.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in wanted:
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    for key, change in wanted.items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.GGUFValue(change, gguf.GGUFValueType.STRING)
        elif change is not None:
            method, value = change  # type: ignore[misc]
            getattr(writer, method)(key, value)
    for tensor in old.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("general__architecture", "mamba", "supports llama, qwen2, qwen3, gemma2, gemma3, phi3, gpt-oss."),
        ("llama__block_count", None, "no metadata 'llama.block_count'"),
        ("llama__block_count", ("add_uint32", 3), "no tensor 'blk.2"),
        ("llama__block_count", ("add_uint32", 2**31), "no model of this kind"),
        ("llama__block_count", ("add_uint32", 1), "blk.1"),
        ("llama__block_count", ("add_string", "2"), "must be of type int"),
        ("llama__block_count", ("add_array", [2, 2]), "got a list"),
        ("llama__context_length", ("add_uint32", 2**32 - 1), "--context-length"),
        ("llama__attention__head_count", ("add_uint32", 5), "not a multiple"),
        ("llama__attention__key_length", ("add_uint32", 24), "24"),
        ("llama__attention__layer_norm_rms_epsilon", ("add_float32", float("nan")), "positive and finite"),
        ("llama__embedding_length", ("add_uint32", 64), "its metadata imply"),
        ("llama__expert_count", ("add_uint32", 8), "expert_count = 8"),
        ("llama__expert_count", ("add_array", [0, 0]), "'llama.expert_count' must be of type int, got a list"),
        ("llama__attention__scale", ("add_array", [0.5]), "'llama.attention.scale' must be of type float, got a list"),
        (
            "llama__attention__causal",
            ("add_array", [True]),
            "'llama.attention.causal' must be of type bool, got a list",
        ),
        ("llama__attention__causal", ("add_bool", False), "attention.causal = False is not supported"),
        ("llama__logit_scale", ("add_string", "1"), "'llama.logit_scale' must be of type float, got '1'"),
        ("llama__attention__sliding_window", ("add_uint64", 2**63), "must be 0 (none) to"),
        ("llama__attention__sliding_window", ("add_int32", -7), "sliding_window is -7"),
        ("general__alignment", ("add_array", list(range(40))), "general.alignment is a list"),
        ("llama__attention__layer_norm_rms_epsilon", ("add_float64", 1e300), "finite as a float32"),
        ("llama__rope__scaling__type", ("add_string", "su"), "scaling 'su' is not supported"),
        ("llama__rope__scaling__factor", ("add_float64", 1e-320), "finite as a float32"),
        ("llama__rope__scaling__factor", ("add_float32", -2.0), "positive"),
        ("llama__rope__scaling__attn_factor", ("add_float32", 0.5), "attn_factor = 0.5 is not supported"),
        ("llama__rope__freq_base", ("add_float64", 1e40), "finite as a float32"),
        ("llama__rope__dimension_count", ("add_uint32", 15), "must be even"),
    ],
)
def test_unusable_models_are_named(tiny: Path, key: str, change: object, words: str) -> None:
    _with_metadata(tiny, **{key: change})
    assert words in refusal(tiny)


LINEAR = ("add_string", "linear")


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"type": LINEAR}, 1.0),
        ({"type": LINEAR, "factor": ("add_float32", 4.0)}, 0.25),
        ({"factor": ("add_float32", 4.0)}, 0.25),
        ({"factor": ("add_float32", 0.0)}, 1.0),
        ({"factor": ("add_float32", 4.0), "attn_factor": ("add_float32", 1.0)}, 0.25),
        ({"type": ("add_string", "none"), "factor": ("add_float32", 4.0)}, 1.0),
        ({"old": ("add_float32", 2.0)}, 0.5),
        ({"old": ("add_float32", 2.0), "factor": ("add_float32", 4.0)}, 0.25),
    ],
)
def test_linear_rope_scaling_follows_llama_cpp(tiny: Path, changes: dict[str, object], scale: float) -> None:
    """Risk: a long-context model whose positions are not scaled converts, and writes nonsense."""
    names = {name: f"llama__rope__scaling__{name}" for name in ("type", "factor", "attn_factor")}
    names["old"] = "llama__rope__scale_linear"
    _with_metadata(tiny, **{names[name]: change for name, change in changes.items()})
    with GGUFFile(tiny) as file:
        config = read_config(file)
        cos, sin = rope_caches(file, config)
    np.testing.assert_allclose([cos[100, 0], sin[100, 0]], [np.cos(100 * scale), np.sin(100 * scale)], atol=1e-6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([float("nan")] * 288, "must hold integers, it holds float"),
        ([1.0] * 288, "must hold integers, it holds float"),
        ([True] * 288, "must hold integers, it holds bool"),
        ([1] * 287, "287 items for 288 tokens"),
    ],
)
def test_token_types_must_be_integers(tiny: Path, tmp_path: Path, values: list[object], words: str) -> None:
    _with_metadata(tiny, tokenizer__ggml__token_type=("add_array", values))
    with pytest.raises(OctavoError, match=words):
        convert(tiny, tmp_path / "model")


def test_not_a_number_in_the_weights_is_refused(tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    with GGUFFile(tiny) as file:
        info = file.tensor("blk.1.ffn_up.weight")
    data[info.offset : info.offset + 4] = struct.pack("<f", float("nan"))
    tiny.write_bytes(bytes(data))
    with GGUFFile(tiny) as file, pytest.raises(OctavoError, match=r"blk\.1\.ffn_up.*NaN"):
        file.dequantised("blk.1.ffn_up.weight")


def write_matrix(path: Path, kind: str, rows: int, columns: int) -> np.ndarray:
    """A file whose only tensor, "w", is random and of `kind`. Returns what the gguf package makes of it."""
    data = quantised(np.random.default_rng(7).standard_normal((rows, columns)).astype(np.float32), Kind[kind])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.quants.dequantize(data, Kind[kind]).reshape(rows, columns)


EXACT_BITS = dict.fromkeys(("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K"), 4) | dict.fromkeys(
    ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"), 8
)


@pytest.mark.parametrize("kind", EXACT_BITS)
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_block_formats_map_exactly(tmp_path: Path, kind: str, form: str) -> None:
    """Risk: a wrong nibble order or offset gives text that is only somewhat worse."""
    expected = write_matrix(tmp_path / "one.gguf", kind, 24, 512)
    with GGUFFile(tmp_path / "one.gguf") as file:
        weight = load(file, "w", form)
    assert isinstance(weight, Blockwise) and weight.shape == (24, 512) and weight.bits == EXACT_BITS[kind]
    np.testing.assert_allclose(weight.dequantised(), expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    order = np.random.default_rng(0).permutation(24)
    np.testing.assert_array_equal(weight.rows(order).dequantised(), weight.dequantised()[order])


@pytest.mark.parametrize(("form", "is_head", "bits"), [("int4", True, 8), ("int4", False, 4), ("int8", False, 8)])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "TQ1_0", "TQ2_0"])
def test_rounded_formats_stay_within_half_a_step(
    tmp_path: Path, kind: str, form: str, is_head: bool, bits: int
) -> None:
    expected = write_matrix(tmp_path / "one.gguf", kind, 24, 512)
    with GGUFFile(tmp_path / "one.gguf") as file:
        weight = load(file, "w", form, is_head=is_head)
    assert isinstance(weight, Blockwise) and weight.bits == bits
    error = np.abs(weight.dequantised() - expected).reshape(*weight.scales.shape, 32)
    assert (error <= 0.5001 * weight.scales[..., None] + 1e-6).all()


def test_row_order_of_partly_rotated_heads() -> None:
    """Two heads of 8 channels, 4 of them rotated: even rows, odd rows, then the rest, head by head."""
    assert half_rotation_order(2, 8, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]


def test_fuzzing_starts_from_files_that_convert(tmp_path: Path) -> None:
    """Guards the test below: damage to a file that is refused anyway finds nothing."""
    for index, data in enumerate(fuzz_gguf.originals(tmp_path)):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(data)
        convert(path, tmp_path / f"model{index}")


def test_fuzzed_files_are_refused_or_right(tmp_path: Path) -> None:
    seed = int(time.time())
    files = fuzz_gguf.originals(tmp_path)
    for case in range(seed, seed + FUZZ_CASES):
        fuzz_gguf.check_case(files, case, tmp_path)  # an assertion names the case's seed
