"""The plain file of named tensors that the Python and the C++ ranks exchange (README.md describes it)."""

import ctypes
import struct
import sys
from typing import NamedTuple

import torch

MAGIC = b"DDPTENS1"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
}

assert sys.byteorder == "little", "the files are little-endian"


class Entry(NamedTuple):
    """A tensor as it lies in the file: equal entries are bit-equal tensors."""
    dtype: str
    shape: tuple
    data: bytes

    def tensor(self):
        if not self.data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(bytearray(self.data), dtype=DTYPES[self.dtype]).view(self.shape)


class Writer:
    def __init__(self, path):
        self._file = open(path, "wb")
        self._file.write(MAGIC)

    def add(self, name, tensor):
        tensor = tensor.detach().cpu().contiguous()
        # Not through NumPy, which has no bfloat16 (and may be missing).
        data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
        for text in (name.encode(), str(tensor.dtype).removeprefix("torch.").encode()):
            self._file.write(struct.pack("<I", len(text)) + text)
        self._file.write(struct.pack(f"<I{tensor.dim()}q", tensor.dim(), *tensor.shape))
        self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def read(path):
    """The file's entries by name, in the file's order."""
    with open(path, "rb") as file:
        content = file.read()
    if content[:len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is not a file of tensors")
    position = len(MAGIC)

    def take(layout):
        nonlocal position
        values = struct.unpack_from(layout, content, position)
        position += struct.calcsize(layout)
        return values

    entries = {}
    while position < len(content):
        name = take(f"<{take('<I')[0]}s")[0].decode()
        dtype = take(f"<{take('<I')[0]}s")[0].decode()
        shape = take(f"<{take('<I')[0]}q")
        size = DTYPES[dtype].itemsize
        for extent in shape:
            size *= extent
        if position + size > len(content):
            raise ValueError(f"{path} ends in the middle of {name}")
        if name in entries:
            raise ValueError(f"{path} holds {name} twice")
        entries[name] = Entry(dtype, shape, content[position:position + size])
        position += size
    return entries
