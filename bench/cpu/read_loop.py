"""The plain read loop of read_loop.cc, compiled for this processor when it is needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).resolve().with_name("read_loop.cc")


class ReadLoop:
    """Reads arrays with `threads` threads, the caller's among them.

    folder: where the compiled loop goes. Raises RuntimeError where there is no compiler ($CXX, else c++) or it fails.
    """

    def __init__(self, threads: int, folder: Path) -> None:
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            raise RuntimeError(f"the read loop needs a C++ compiler; {compiler} is not there")
        library = folder / "read_loop.so"
        flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        done = subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} does not compile {SOURCE.name}:\n{done.stderr}")
        self._code = ctypes.CDLL(str(library))
        self._code.octavo_reader_create.restype = ctypes.c_void_p
        self._code.octavo_reader_destroy.argtypes = [ctypes.c_void_p]
        self._code.octavo_reader_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._code.octavo_reader_read.restype = ctypes.c_uint64
        self._reader = self._code.octavo_reader_create(threads)

    def read(self, array: np.ndarray) -> int:
        """All 64-bit words of a contiguous array or-ed together; up to 7 bytes at its end stay unread."""
        if not array.flags.c_contiguous:
            raise ValueError("the read loop takes contiguous arrays")
        return self._code.octavo_reader_read(self._reader, array.ctypes.data, array.nbytes // 8)

    def close(self) -> None:
        """Ends its threads."""
        if self._reader is not None:
            self._code.octavo_reader_destroy(self._reader)
            self._reader = None
