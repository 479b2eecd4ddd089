"""Compares what two jobs made of one cell: the referee's, all of Python's ranks, and the one under test."""

import math
from typing import NamedTuple

import tensor_file

END = "end"


class Outcome(NamedTuple):
    difference: float
    is_bit_equal: bool
    ranks_equal: bool
    buckets: int
    complaints: list


class Results:
    """What the ranks of a job wrote for a cell. The entries' names are LABEL/TENSOR, the label is a step or "end"."""

    def __init__(self, job, cell, world_size, trained):
        """`trained`: the names of the model's parameters; all other tensors are buffers."""
        files = [tensor_file.read(f"{job}/{cell.name}.{rank}") for rank in range(world_size)]
        self.layouts = [file.pop("buckets").tensor().tolist() for file in files]
        self.names = [list(file) for file in files]
        self.parameters = [{name: file[name] for name in file if tensor_of(name) in trained} for file in files]
        self.buffers = [{name: file[name] for name in file if tensor_of(name) not in trained} for file in files]


def label_of(name):
    return name.partition("/")[0]


def tensor_of(name):
    return name.partition("/module.")[2]


def largest_difference(expected, found):
    """The largest difference of a tensor after any step over the largest value then, and where it is."""
    if expected == found:
        return 0.0, ""
    scales = {}
    for name, entry in expected.items():
        largest = entry.tensor().abs().max().item()
        scales[label_of(name)] = max(scales.get(label_of(name), 0.0), largest)
    worst, where = 0.0, ""
    for name, entry in expected.items():
        if entry == found[name]:
            continue
        value = (entry.tensor() - found[name].tensor()).abs().max().item() / scales[label_of(name)]
        value = value if math.isfinite(value) else math.inf
        if value > worst or not where:
            worst, where = value, name
    return worst, where


def over_ranks(expected, found):
    return max((largest_difference(*pair) for pair in zip(expected, found)), key=lambda result: result[0])


def why_vacuous(cell, parameters, weights):
    """Why equal results would prove nothing, or None."""
    for name, entry in parameters.items():
        if label_of(name) != END:
            continue
        parameter = tensor_of(name)
        if not entry.tensor().isfinite().all():
            return f"{parameter} is not finite"
        stays = cell.settings.get("spare") == "never" and parameter.startswith("spare.")
        if (entry == weights[parameter]) != stays:
            return f"{parameter} {'was trained without being used' if stays else 'was not trained'}"
    return None


def first_rank_difference(cell, parameters):
    """The first entry in which ranks differ although the cell makes them equal, or None."""
    first = {}
    for one in parameters:
        for name, entry in one.items():
            if cell.makes_ranks_equal(label_of(name)) and first.setdefault(name, entry) != entry:
                return name
    return None


def compare(cell, inputs, referee, job, world_size):
    """`referee` and `job`: the two jobs' folders."""
    weights = tensor_file.read(f"{inputs}/weights.{cell.model}")
    expected, found = (Results(folder, cell, world_size, weights) for folder in (referee, job))
    complaints = []
    for rank, (theirs, ours) in enumerate(zip(expected.names, found.names)):
        if theirs != ours:
            complaints.append(f"rank {rank} has other tensors or steps, or in another order: Python's {theirs[:40]}, "
                              f"ours {ours[:40]}")
            return Outcome(math.inf, False, False, len(found.layouts[0]), complaints)
    vacuous = why_vacuous(cell, expected.parameters[0], weights)
    if vacuous:
        complaints.append(f"the cell proves nothing: in Python {vacuous}")
    if first_rank_difference(cell, expected.parameters):
        complaints.append("the cell proves nothing: Python's ranks differ among themselves")

    rank_difference = first_rank_difference(cell, found.parameters)
    if rank_difference:
        complaints.append(f"the ranks differ among themselves, first in {rank_difference} (STEP/PARAMETER)")
    is_bit_equal = expected.parameters == found.parameters
    worst, where = over_ranks(expected.parameters, found.parameters)
    if not worst <= cell.bound:
        first = next(name for one, other in zip(expected.parameters, found.parameters) for name in one
                     if one[name] != other[name])
        complaints.append(f"differs by {worst:.1e} of the largest parameter in {where} (bound: {cell.bound:.0e}); "
                          f"the first difference is in {first} (STEP/PARAMETER)")
    elif cell.is_exact(world_size) and not is_bit_equal:
        complaints.append(f"not bit-equal at 2 ranks: {where} (STEP/PARAMETER)")
    if expected.buffers != found.buffers:
        value, where = over_ranks(expected.buffers, found.buffers)
        if is_bit_equal or value > cell.bound:
            complaints.append(f"a buffer differs by {value:.1e} of the largest buffer: {where} (STEP/BUFFER)")
    for layout in {tuple(layout) for layout in found.layouts}:
        if cell.layout(layout) != cell.layout(tuple(expected.layouts[0])):
            complaints.append(f"other buckets: Python's have {expected.layouts[0]} bytes, ours {list(layout)}")
    if "bucket_cap_mb" in cell.settings and len(found.layouts[0]) < 2:
        complaints.append("the cell is to have several buckets and has one")
    return Outcome(worst, is_bit_equal, rank_difference is None, len(found.layouts[0]), complaints)
