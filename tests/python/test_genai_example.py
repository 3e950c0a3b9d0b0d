"""examples/genai.py, the engine API without octavo's own wrapper. Risk: it teaches calls that do not work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models_support import TinyShape, require_library, write_tiny_gguf

import octavo
from octavo.convert import convert
from octavo.engine import Sampling, TextEngine
from octavo.graph import GraphOptions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/genai.py"
PROMPT = "the hills"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and random, with a chat template."""
    require_library()
    folder = tmp_path_factory.mktemp("example")
    write_tiny_gguf(folder / "tiny.gguf", TinyShape(), optional_keys=True)
    convert(folder / "tiny.gguf", folder / "model", GraphOptions(weight_form="float32"))
    return folder / "model"


def run_example(model_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), str(model_dir), PROMPT]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_prints_what_octavo_generates(model_dir: Path) -> None:
    done = run_example(model_dir)
    assert done.returncode == 0, done.stderr
    *_, answer = TextEngine(model_dir).generate([PROMPT], Sampling(max_tokens=64))
    assert answer.token_ids and done.stdout == answer.text + "\n"
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 30


def test_a_failure_is_not_silent(model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    text = (tmp_path / "genai_config.json").read_text(encoding="utf-8")
    (tmp_path / "genai_config.json").unlink()
    (tmp_path / "genai_config.json").write_text(text.replace('"block_size": 16', '"block_size": 32'), encoding="utf-8")
    done = run_example(tmp_path)
    assert done.returncode != 0 and "Expected: 16" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["model"], ["model", "Why", "is"]])
def test_other_arguments_get_the_usage(arguments: list[str]) -> None:
    command = [sys.executable, str(EXAMPLE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "usage: python genai.py MODEL_DIR PROMPT\n")


def test_the_generator_api_does_not_run_paged_models(model_dir: Path) -> None:
    """What the docstring says. When this fails, onnxruntime-genai has learned it: change the docstring."""
    import onnxruntime_genai as og

    model = og.Model(octavo.genai_config(model_dir))
    generator = og.Generator(model, og.GeneratorParams(model))
    with pytest.raises(RuntimeError, match="Invalid rank for input: input_ids"):
        generator.append_tokens(np.array([1, 2, 3], np.int32))
