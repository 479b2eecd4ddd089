"""One rank of Python's DistributedDataParallel for the benchmark; bench_step.cpp says how it is spoken to.

usage: bench_step.py PEER    with RANK, WORLD_SIZE, ... as a launcher sets them
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH, LEARNING_RATE = 12, 1024, 32, 0.01
OPTIONS = {"python": {}, "python_bucket_view": {"gradient_as_bucket_view": True}}


def main():
    options = OPTIONS[sys.argv[1]]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
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
