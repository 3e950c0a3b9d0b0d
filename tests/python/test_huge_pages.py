"""Large pages under what is loaded. Risks: memory that changes, an address not malloc's, work for short answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octavo import huge_pages
from octavo.engine import LONG_ANSWER, Sampling, TextEngine

MIB = 1 << 20
MAPS = """\
00400000-00c00000 rw-p 00000000 00:00 0                                  [heap]
01000000-02000000 r--p 00000000 00:00 0
02000000-03000000 rw-s 00000000 00:00 0
03000000-04000000 rw-p 00000000 fd:00 42                                 /usr/lib/libc.so.6
04000000-04100000 rw-p 00000000 00:00 0
05100000-06f00000 rw-p 00000000 00:00 0
07000000-08000000 rw-p 00000000 00:00 0                                  [stack]
"""


def test_only_whole_pages_of_private_memory() -> None:
    assert huge_pages._ranges(MAPS.splitlines()) == [(4 * MIB, 8 * MIB), (0x5200000, 28 * MIB)]


def test_contents_stay(tmp_path: Path) -> None:
    values = np.random.default_rng(5).integers(0, 256, 16 * MIB, np.uint8)
    before = values.copy()
    huge_pages.collapse()
    assert np.array_equal(values, before)


def test_a_system_without_maps_is_left_alone(tmp_path: Path) -> None:
    assert huge_pages.collapse(str(tmp_path / "absent")) == 0


@pytest.mark.parametrize(("lengths", "calls"), [((LONG_ANSWER - 1,) * 3, 0), ((8, LONG_ANSWER, LONG_ANSWER), 1)])
def test_long_answers_get_them_once(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], calls: int) -> None:
    made: list[None] = []
    monkeypatch.setattr(huge_pages, "collapse", lambda: made.append(None))
    monkeypatch.setattr("octavo.engine._Batch", lambda *_: SimpleNamespace(run=lambda prompts: [], close=lambda: None))
    engine = TextEngine.__new__(TextEngine)
    engine._is_dead = engine._has_huge_pages = False
    for length in lengths:
        assert list(engine.generate(["a"], Sampling(max_tokens=length))) == []
    assert len(made) == calls
