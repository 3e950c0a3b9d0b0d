"""Fixtures of the tests of the octavo command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cli_support import SECONDS, Run, command
from models_support import TinyShape, require_library, write_tiny_gguf

from octavo.convert import convert
from octavo.graph import GraphOptions


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs octavo in an empty folder; no traceback is ever right."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(  # type: ignore[call-overload]
            command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, **options
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_gguf(folder / "tiny.gguf", TinyShape(context=16384))
    convert(folder / "tiny.gguf", folder / "model", GraphOptions(weight_form="float32"), num_blocks=3100)
    return folder / "model"


@pytest.fixture
def library() -> None:
    require_library()
