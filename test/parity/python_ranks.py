"""One rank of the Python side: runs the plan's cells in Python's DistributedDataParallel and writes the
parameters after every step. parity_ranks.cpp is its twin."""

import contextlib
import datetime
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks, post_localSGD_hook, powerSGD_hook, quantization_hooks)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import tensor_file
from cells import LOCAL_START, spare_is_used, steps_of
from models import MODELS

TIMEOUT = datetime.timedelta(seconds=60)


def ddp_options(settings):
    """Takes DDP's options out of `settings`."""
    options = {}
    for flag in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        if flag in settings:
            options[flag] = settings.pop(flag) == "1"
    if "bucket_cap_mb" in settings:
        options["bucket_cap_mb"] = float(settings.pop("bucket_cap_mb"))
    return options


class GatherAsOverNccl:
    """torch.distributed for Python's quantisation hooks. They expect all_gather's future to hold all ranks' parts
    in one tensor, as NCCL's does; Gloo's holds a list, and with it the hooks fail."""

    class Gather(NamedTuple):
        work: dist.Work

        def get_future(self):
            return self.work.get_future().then(lambda future: [torch.stack(future.wait())])

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_gather(self, outputs, tensor, group, async_op):
        return self.Gather(dist.all_gather(outputs, tensor, group=group, async_op=async_op))


quantization_hooks.dist = GatherAsOverNccl()


def power_sgd_state(settings):
    return powerSGD_hook.PowerSGDState(None, int(settings.pop("low_rank")), start_powerSGD_iter=2,
                                       warm_start=settings.pop("warm_start", "1") == "1")


def post_local_sgd_state(settings):
    subgroup = None
    has_subgroups = settings.pop("subgroups") == "1"
    if has_subgroups:
        # Pairs; the last rank of an odd number is alone. Every rank makes all groups.
        size = dist.get_world_size()
        groups = [dist.new_group(list(range(first, min(first + 2, size)))) for first in range(0, size, 2)]
        subgroup = groups[dist.get_rank() // 2]
    return post_localSGD_hook.PostLocalSGDState(None, subgroup, LOCAL_START, has_subgroups)


# Each: the hook, and what makes its state of the settings.
HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, None),
    "fp16_compress": (default_hooks.fp16_compress_hook, None),
    "bf16_compress": (default_hooks.bf16_compress_hook, None),
    "fp16_compress_wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None),
    "bf16_compress_wrapper": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), None),
    "power_sgd": (powerSGD_hook.powerSGD_hook, power_sgd_state),
    "fp16_power_sgd": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd_state),
    "quantization_per_tensor": (quantization_hooks.quantization_pertensor_hook, None),
    "quantization_per_channel": (quantization_hooks.quantization_perchannel_hook, None),
    "post_local_sgd": (post_localSGD_hook.post_localSGD_hook, post_local_sgd_state),
}


def register_hook(model, settings):
    """Takes the hook's settings out of `settings`."""
    name = settings.pop("hook", None)
    if name is None:
        return
    hook, make_state = HOOKS[name]

    # Under a name of its own: Python refuses its bfloat16 hooks by their names where there is no NCCL.
    def named_hook(state, bucket):
        return hook(state, bucket)

    model.register_comm_hook(make_state(settings) if make_state else None, named_hook)


def load(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].tensor())


def bucket_sizes(model):
    """The buckets' sizes in bytes, in the order in which they are reduced."""
    data = model._get_ddp_logging_data()
    # Of the last but one forward; there may be none.
    sizes = data["rebuilt_bucket_sizes"] if data.get("has_rebuilt_buckets") else data["bucket_sizes"]
    return torch.tensor([int(size) for size in sizes.split(",")])


def run_cell(plan, cell, inputs, folder):
    rank = dist.get_rank()
    settings = dict(cell.settings)
    spare = settings.pop("spare", None)
    micro_batches = int(settings.pop("accumulate", "1"))
    set_to_none = settings.pop("set_to_none", "1") == "1"
    momentum = float(settings.pop("momentum"))
    weight_decay = float(settings.pop("weight_decay", "0"))
    averaging = int(settings.pop("averaging", "0"))
    evaluate = settings.pop("evaluate", "0") == "1"
    settings.pop("python_compatible", None)
    join = settings.pop("join", None)
    options = ddp_options(settings)
    hook_settings = {key: settings.pop(key) for key in ("hook", "low_rank", "warm_start", "subgroups")
                     if key in settings}
    if settings:
        raise ValueError(f"{cell.name}: unknown settings {settings}")

    batches = tensor_file.read(f"{inputs}/batches.{cell.model}.{rank}")
    torch.manual_seed(rank)
    module = MODELS[cell.model](with_spare=spare is not None)
    if rank == 0:
        # The other ranks start from weights of their own, and get rank 0's by being wrapped.
        load(module, tensor_file.read(f"{inputs}/weights.{cell.model}"))
    model = DistributedDataParallel(module, **options)
    register_hook(model, hook_settings)
    averager = PeriodicModelAverager(averaging, warmup_steps=LOCAL_START) if averaging else None
    optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate, momentum=momentum,
                                weight_decay=weight_decay)

    def add_state(results, label):
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            results.add(f"{label}/{name}", tensor)

    with tensor_file.Writer(f"{folder}/{cell.name}.{rank}") as results:
        with model.join(divide_by_initial_world_size=join == "initial") if join else contextlib.nullcontext():
            for step in range(steps_of(join, plan.steps, rank, dist.get_world_size())):
                optimizer.zero_grad(set_to_none)
                for micro in range(micro_batches):
                    batch = step * micro_batches + micro
                    is_last = micro + 1 == micro_batches
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        output = model(batches[f"{batch}/input"].tensor(), spare_is_used(spare, rank, step))
                        loss = module.loss(output, batches[f"{batch}/target"].tensor())
                        (loss / micro_batches).backward()
                optimizer.step()
                if averager:
                    averager.average_parameters(model.parameters())
                if evaluate:
                    model.eval()
                    with torch.no_grad():
                        model(batches[f"{step}/input"].tensor(), False)
                    model.train()
                add_state(results, step)
        add_state(results, "end")
        results.add("buckets", bucket_sizes(model))


def run_all(plan, inputs, folder):
    """The whole of one rank's process; RANK, WORLD_SIZE, ... are as a launcher sets them."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for cell in plan.cells:
        print(cell.name, flush=True)  # the log's last word, should the process die
        run_cell(plan, cell, inputs, folder)
    # Rank 0 serves the store: nobody is to miss it.
    dist.barrier()
    dist.destroy_process_group()
