"""The referee: trains the same models from the same weights on the same batches in Python's
DistributedDataParallel and in ddp's, and compares the parameters after every step.

usage: run.py --program PARITY_RANKS [--mixed] [--ranks 2,3,4] [--models ...] [--modes ...] [--cells ...]

Prints the matrix. Status 0: every cell is within its bounds; 1: not; 77: there is no torch to compare
with. README.md says what is compared, and how to add to it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch comes in; the ranks inherit it

import argparse
import shutil
import signal
import sys
import tempfile
import time

SKIPPED = 77

try:
    import torch
    import torch._dynamo  # which DDP imports: once, and not in every rank
    import torch.distributed
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ImportError("this torch has no torch.distributed with Gloo")
except ImportError as error:
    print(f"parity: skipped: {sys.executable} cannot be compared with: {error}")
    sys.exit(SKIPPED)

sys.dont_write_bytecode = True  # the source folder stays as it is

import python_ranks
import tensor_file
from cells import MIXED_MODES, MODES, Cell, Plan
from comparison import compare
from models import MODELS
from ranks import RanksFailed, run_ranks


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
    parser.add_argument("--mixed", action="store_true", help="jobs of Python's and C++ ranks in place of C++ ones")
    parser.add_argument("--models", type=names(MODELS))
    parser.add_argument("--modes", type=names(MODES))
    parser.add_argument("--cells", type=names([f"{model}.{mode}" for model in MODELS for mode in MODES]),
                        help="MODEL.MODE,... in place of all modes of all models")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--timeout", default=240, type=float, help="seconds for one side's run of a rank count")
    parser.add_argument("--libtorch-version", help="what the program was built with")
    parser.add_argument("--keep", action="store_true", help="keep the files, and say where they are")
    return parser.parse_args()


def write_inputs(cells, steps, folder, world_size):
    """Starting weights of every model, and every rank's batches."""
    os.makedirs(folder)
    for number, name in enumerate(MODELS):
        micro_batches = [cell.micro_batches for cell in cells if cell.model == name]
        if not micro_batches:
            continue
        torch.manual_seed(number)
        with tensor_file.Writer(f"{folder}/weights.{name}") as file:
            for parameter_name, parameter in MODELS[name](with_spare=True).named_parameters():
                file.add(parameter_name, parameter)
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * (number + 1) + rank)
            with tensor_file.Writer(f"{folder}/batches.{name}.{rank}") as file:
                for batch in range(steps * max(micro_batches)):
                    for part, tensor in zip(("input", "target"), MODELS[name].batch(generator)):
                        file.add(f"{batch}/{part}", tensor)


def run_job(kinds, options, cells, inputs):
    """Runs the cells on ranks of these kinds, and returns the folder of their results and the seconds taken.

    `kinds`: a letter a rank; P is Python's, C is C++.
    """
    folder = f"{os.path.dirname(inputs)}/{kinds}"
    os.makedirs(folder)
    plan = Plan(options.steps, 0.05, "P" in kinds, cells)
    plan.write(f"{folder}/plan")

    def body(rank):
        if kinds[rank] == "C":
            os.execv(options.program, [options.program, inputs, folder])
        torch.set_num_threads(1)
        python_ranks.run_all(plan, inputs, folder)

    start = time.monotonic()
    run_ranks(kinds, body, folder, options.timeout)
    return folder, time.monotonic() - start


def mixed_jobs(world_size):
    """Python's and C++ ranks in turn, beginning with either."""
    return [("PC" * world_size)[:world_size], ("CP" * world_size)[:world_size]]


def print_block(title, cells, inputs, referee, job, world_size):
    """One block of the matrix; returns the number of cells that miss their bounds."""
    widths = [max(len(name) for name in names) for names in (MODELS, MODES)]
    print(f"\n{title}")
    print(f"  {'model':{widths[0]}}  {'mode':{widths[1]}}  difference  ranks   buckets")
    failed = 0
    for cell in cells:
        outcome = compare(cell, inputs, referee, job, world_size)
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


def run_rank_count(options, cells, world_size, folder):
    """Runs and prints the blocks of a rank count; how many cells were compared, and how many miss their bounds."""
    inputs = f"{folder}/inputs"
    write_inputs(cells, options.steps, inputs, world_size)
    try:
        referee, referee_seconds = run_job("P" * world_size, options, cells, inputs)
    except RanksFailed as error:
        # Seen on a loaded machine: a job without any C++ rank ends with SIGSEGV inside Python's torch.
        if "ended with SIG" not in str(error):
            raise
        print(f"Python's own job crashed; once more.\n{error}", flush=True)
        shutil.rmtree(f"{folder}/{'P' * world_size}")
        referee, referee_seconds = run_job("P" * world_size, options, cells, inputs)
    jobs = mixed_jobs(world_size) if options.mixed else ["C" * world_size]
    failed = 0
    for kinds in jobs:
        job, seconds = run_job(kinds, options, cells, inputs)
        what = f"{kinds}, P: Python's, C: ours" if options.mixed else "ours"
        failed += print_block(f"{world_size} ranks ({what}, {seconds:.1f} s; Python's alone {referee_seconds:.1f} s)",
                              cells, inputs, referee, job, world_size)
    return len(cells) * len(jobs), failed


def print_left_out(cells):
    """The cells that do not apply, by the reason."""
    by_reason = {}
    for cell in cells:
        by_reason.setdefault(cell.reason_against, []).append(cell)
    for reason, members in by_reason.items():
        print(f"\nDoes not apply: {reason}:")
        for model in dict.fromkeys(cell.model for cell in members):
            print(f"  {model}: {', '.join(cell.mode for cell in members if cell.model == model)}")


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
        cells = [Cell(model, mode) for model in options.models or MODELS
                 for mode in options.modes or (MIXED_MODES if options.mixed else MODES)]
    left_out = [cell for cell in cells if cell.reason_against]
    cells = [cell for cell in cells if not cell.reason_against]

    # A test that is stopped still kills its ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"Parity with Python's DistributedDataParallel (torch {torch.__version__}): {options.steps} steps of SGD with "
          "momentum.\nDifference: largest of a parameter after any step, over the largest parameter; bit: bit-equal.")
    folder = tempfile.mkdtemp(prefix="ddp-parity-")
    try:
        results = [run_rank_count(options, cells, world_size, f"{folder}/{world_size}")
                   for world_size in options.ranks if cells]
    except RanksFailed as error:
        print(error)
        return 1
    finally:
        if options.keep:
            print(f"the files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print_left_out(left_out)
    total, failed = (sum(numbers) for numbers in zip(*results)) if results else (0, 0)
    print(f"\n{total - failed} of {total} cells are within their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
