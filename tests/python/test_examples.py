"""The README shows the examples that the tests run, word for word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "language"), [("paged_attention.cc", "cpp"), ("paged_attention.py", "python")])
def test_readme_shows_the_example(file: str, language: str) -> None:
    text = (ROOT / "examples" / file).read_text(encoding="utf-8")
    assert f"```{language}\n{text}```" in README


def test_python_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/paged_attention.py")]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "every value is 0.25\n" in completed.stdout


def test_readme_links_lead_somewhere() -> None:
    links = [part.split(")")[0] for part in README.split("](")[1:]]
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link.split("#")[0]).exists()]
    assert links and not missing
