"""The referee: trains the same models from the same weights on the same batches in Python's
DistributedDataParallel and in ddp's, and compares the parameters after every step.

usage: run.py --program PARITY_RANKS [--ranks 2,3,4] [--models ...] [--modes ...] [--cells ...]

Prints the matrix. Status 0: every cell is within its bounds; 1: not; 77: there is no torch to compare
with. README.md says what is compared, and how to add to it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes in; the ranks inherit it

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from typing import NamedTuple

SKIPPED = 77

try:
    import torch
    import torch.distributed
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ImportError("this torch has no torch.distributed with Gloo")
except ImportError as error:
    print(f"parity: skipped: {sys.executable} cannot be compared with: {error}")
    sys.exit(SKIPPED)

sys.dont_write_bytecode = True  # the source folder stays as it is

import python_ranks
import tensor_file
from cells import MODES, Cell, Plan
from models import MODELS
from ranks import RanksFailed, run_ranks


class Outcome(NamedTuple):
    difference: float
    is_bit_equal: bool
    ranks_equal: bool
    buckets: int
    complaints: list


def parse_arguments():
    def names(known):
        def parse(text):
            values = text.split(",")
            unknown = [value for value in values if value not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)} not among {', '.join(known)}")
            return values
        return parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="the C++ side, parity_ranks")
    parser.add_argument("--ranks", default="2,3,4", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--models", default=list(MODELS), type=names(MODELS))
    parser.add_argument("--modes", default=list(MODES), type=names(MODES))
    parser.add_argument("--cells", type=names([f"{model}.{mode}" for model in MODELS for mode in MODES]),
                        help="MODEL.MODE,... in place of all modes of all models")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--timeout", default=240, type=float, help="seconds for one side's run of a rank count")
    parser.add_argument("--libtorch-version", help="what the program was built with")
    parser.add_argument("--keep", action="store_true", help="keep the files, and say where they are")
    return parser.parse_args()


def write_inputs(plan, folder, world_size):
    """Starting weights of every model, and every rank's batches."""
    for number, name in enumerate(sorted({cell.model for cell in plan.cells})):
        torch.manual_seed(number)
        with tensor_file.Writer(f"{folder}/weights.{name}") as file:
            for parameter_name, parameter in MODELS[name](with_spare=True).named_parameters():
                file.add(parameter_name, parameter)
        count = plan.steps * max(cell.micro_batches for cell in plan.cells if cell.model == name)
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * (number + 1) + rank)
            with tensor_file.Writer(f"{folder}/batches.{name}.{rank}") as file:
                for batch in range(count):
                    for part, tensor in zip(("input", "target"), MODELS[name].batch(generator)):
                        file.add(f"{batch}/{part}", tensor)


def run_python(plan, folder, world_size, limit):
    def body():
        torch.set_num_threads(1)
        python_ranks.run_all(plan, folder)

    run_ranks("python", world_size, body, folder, limit)


def run_cpp(program, folder, world_size, limit):
    run_ranks("cpp", world_size, lambda: os.execv(program, [program, folder]), folder, limit)


def difference(expected, found, steps):
    """The largest difference of a parameter after any step over the largest parameter then, and where
    it is."""
    worst, where = 0.0, ""
    for step in range(steps):
        names = [name for name in expected if name.startswith(f"{step}/")]
        scale = max(expected[name].tensor().abs().max().item() for name in names)
        for name in names:
            if expected[name] == found[name]:
                continue
            value = (expected[name].tensor() - found[name].tensor()).abs().max().item() / scale
            value = value if math.isfinite(value) else math.inf
            if value > worst:
                worst, where = value, name
    return worst, where


def is_vacuous(cell, parameters, folder, steps):
    """Why equal results would prove nothing, or None."""
    weights = tensor_file.read(f"{folder}/weights.{cell.model}")
    for name, entry in parameters.items():
        step, _, parameter = name.partition("/module.")
        if step != str(steps - 1):
            continue
        if not entry.tensor().isfinite().all():
            return f"{parameter} is not finite"
        stays = cell.settings.get("spare") == "never" and parameter.startswith("spare.")
        if (entry == weights[parameter]) != stays:
            return f"{parameter} {'was trained without being used' if stays else 'was not trained'}"
    return None


def first_rank_difference(cell, results):
    """The first entry in which the ranks differ although the cell makes them equal, or None."""
    for name in results[0]:
        if cell.makes_ranks_equal(int(name.partition("/")[0])) and any(one[name] != results[0][name] for one in results):
            return name
    return None


def compare(cell, folder, world_size, steps):
    expected = [tensor_file.read(f"{folder}/python.{cell.name}.{rank}") for rank in range(world_size)]
    found = [tensor_file.read(f"{folder}/cpp.{cell.name}.{rank}") for rank in range(world_size)]
    layouts = [side[0]["buckets"].tensor().tolist() for side in (expected, found)]
    for results in expected + found:
        del results["buckets"]
    complaints = []
    if list(expected[0]) != list(found[0]):
        complaints.append("the two sides have other parameters, or in another order: "
                          f"{list(expected[0])[:40]} and {list(found[0])[:40]}")
        return Outcome(float("inf"), False, False, len(layouts[1]), complaints)
    vacuous = is_vacuous(cell, expected[0], folder, steps)
    if vacuous:
        complaints.append(f"the cell proves nothing: in Python {vacuous}")
    if first_rank_difference(cell, expected):
        complaints.append("the cell proves nothing: Python's ranks differ among themselves")

    rank_difference = first_rank_difference(cell, found)
    if rank_difference:
        complaints.append(f"the ranks differ among themselves, first in {rank_difference} (STEP/PARAMETER)")
    is_bit_equal = all(a == b for a, b in zip(expected, found))
    worst, where = max((difference(a, b, steps) for a, b in zip(expected, found)), key=lambda pair: pair[0])
    if not worst <= cell.bound:
        first = next(name for name in expected[0] if any(a[name] != b[name] for a, b in zip(expected, found)))
        complaints.append(f"differs by {worst:.1e} of the largest parameter in {where} (bound: {cell.bound:.0e}); "
                          f"the first difference is in {first} (STEP/PARAMETER)")
    elif world_size == 2 and not is_bit_equal:
        # The order of additions does not matter with two summands.
        complaints.append(f"not bit-equal at 2 ranks: {where} (STEP/PARAMETER)")
    if layouts[0] != layouts[1]:
        complaints.append(f"other buckets: Python's have {layouts[0]} bytes, ours {layouts[1]}")
    if "bucket_cap_mb" in cell.settings and len(layouts[1]) < 2:
        complaints.append("the cell is to have several buckets and has one")
    return Outcome(worst, is_bit_equal, rank_difference is None, len(layouts[1]), complaints)


def run_rank_count(options, cells, world_size, folder):
    """Runs and prints one block of the matrix; the number of cells that miss their bounds."""
    plan = Plan(options.steps, 0.05, 0.9, cells)
    os.makedirs(folder)
    plan.write(f"{folder}/plan")
    write_inputs(plan, folder, world_size)
    start = time.monotonic()
    run_python(plan, folder, world_size, options.timeout)
    middle = time.monotonic()
    run_cpp(options.program, folder, world_size, options.timeout)
    end = time.monotonic()

    widths = [max(len(name) for name in names) for names in (MODELS, MODES)]
    print(f"\n{world_size} ranks (Python {middle - start:.1f} s, ours {end - middle:.1f} s)")
    print(f"  {'model':{widths[0]}}  {'mode':{widths[1]}}  difference  ranks   buckets")
    failed = 0
    for cell in cells:
        outcome = compare(cell, folder, world_size, plan.steps)
        value = "bit" if outcome.is_bit_equal else f"{outcome.difference:.1e}"
        ranks = "equal" if outcome.ranks_equal else "DIFFER"
        verdict = "  MISSED" if outcome.complaints else ""
        print(f"  {cell.model:{widths[0]}}  {cell.mode:{widths[1]}}  {value:10}  {ranks:6}  "
              f"{outcome.buckets:7}{verdict}")
        for complaint in outcome.complaints:
            print(f"      {complaint}")
        failed += bool(outcome.complaints)
    sys.stdout.flush()
    return failed


def main():
    options = parse_arguments()
    torch.set_num_threads(1)
    version = torch.__version__.partition("+")[0]
    if options.libtorch_version not in (None, "unknown", version):
        print(f"parity: skipped: the program has LibTorch {options.libtorch_version} and {sys.executable} torch "
              f"{version}: only one and the same computes the same bits")
        return SKIPPED
    if options.cells:
        cells = [Cell(*name.split(".")) for name in options.cells]
    else:
        cells = [Cell(model, mode) for model in options.models for mode in options.modes]

    # A test that is stopped still kills its ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"Parity with Python's DistributedDataParallel (torch {torch.__version__}): {options.steps} steps of SGD with "
          "momentum.\nDifference: largest of a parameter after any step, over the largest parameter; bit: bit-equal.")
    folder = tempfile.mkdtemp(prefix="ddp-parity-")
    try:
        failed = sum(run_rank_count(options, cells, world_size, f"{folder}/{world_size}")
                     for world_size in options.ranks)
    except RanksFailed as error:
        print(error)
        return 1
    finally:
        if options.keep:
            print(f"the files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    total = len(cells) * len(options.ranks)
    print(f"\n{total - failed} of {total} cells are within their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
