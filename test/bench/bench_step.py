"""One rank of Python's DistributedDataParallel for the benchmark; bench_step.cpp says how it is spoken to.

usage: bench_step.py PEER WORKLOAD [STEPS]    with RANK, WORLD_SIZE, ... as a launcher sets them
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workloads import make_workload

LEARNING_RATE = 1e-3
OPTIONS = {"python": {}, "python_bucket_view": {"gradient_as_bucket_view": True}}


def main():
    options = OPTIONS[sys.argv[1]]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    model, x, target = make_workload(sys.argv[2])
    model = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    if len(sys.argv) > 3:
        turns = sys.argv[3:]
    else:
        print("ready", flush=True)
        turns = sys.stdin
    for turn in turns:
        steps = int(turn)
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
        print(f"{(time.perf_counter() - start) / max(steps, 1):.9f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
