"""One rank of the Python side: runs the plan's cells in Python's DistributedDataParallel and writes the
parameters after every step. parity_ranks.cpp is its twin."""

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tensor_file
from cells import spare_is_used
from models import MODELS

TIMEOUT = datetime.timedelta(seconds=60)


def ddp_options(settings):
    """Takes DDP's options out of `settings`."""
    options = {}
    for flag in ("find_unused_parameters", "gradient_as_bucket_view"):
        if flag in settings:
            options[flag] = settings.pop(flag) == "1"
    if "bucket_cap_mb" in settings:
        options["bucket_cap_mb"] = float(settings.pop("bucket_cap_mb"))
    return options


def load(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].tensor())


def bucket_sizes(model):
    """The buckets' sizes in bytes, in the order in which they are reduced."""
    data = model._get_ddp_logging_data()
    sizes = data["rebuilt_bucket_sizes"] if data["has_rebuilt_buckets"] else data["bucket_sizes"]
    return torch.tensor([int(size) for size in sizes.split(",")])


def run_cell(plan, cell, folder):
    rank = dist.get_rank()
    settings = dict(cell.settings)
    spare = settings.pop("spare", None)
    micro_batches = int(settings.pop("accumulate", "1"))
    set_to_none = settings.pop("set_to_none", "1") == "1"
    weight_decay = float(settings.pop("weight_decay", "0"))
    options = ddp_options(settings)
    if settings:
        raise ValueError(f"{cell.name}: unknown settings {settings}")

    batches = tensor_file.read(f"{folder}/batches.{cell.model}.{rank}")
    torch.manual_seed(rank)
    module = MODELS[cell.model](with_spare=spare is not None)
    if rank == 0:
        # The other ranks start from weights of their own, and get rank 0's by being wrapped.
        load(module, tensor_file.read(f"{folder}/weights.{cell.model}"))
    model = DistributedDataParallel(module, **options)
    optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate, momentum=plan.momentum,
                                weight_decay=weight_decay)

    with tensor_file.Writer(f"{folder}/python.{cell.name}.{rank}") as results:
        for step in range(plan.steps):
            optimizer.zero_grad(set_to_none)
            for micro in range(micro_batches):
                batch = step * micro_batches + micro
                is_last = micro + 1 == micro_batches
                with contextlib.nullcontext() if is_last else model.no_sync():
                    output = model(batches[f"{batch}/input"].tensor(), spare_is_used(spare, rank, step))
                    loss = module.loss(output, batches[f"{batch}/target"].tensor())
                    (loss / micro_batches).backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                results.add(f"{step}/{name}", parameter)
        results.add("buckets", bucket_sizes(model))


def run_all(plan, folder):
    """The whole of one rank's process; RANK, WORLD_SIZE, ... are as a launcher sets them."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for cell in plan.cells:
        print(cell.name, flush=True)  # the log's last word, should the process die
        run_cell(plan, cell, folder)
    # Rank 0 serves the store: nobody is to miss it.
    dist.barrier()
    dist.destroy_process_group()
