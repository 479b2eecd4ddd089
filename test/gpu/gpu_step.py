"""Python's side of scripts/gpu_check.sh; gpu_step.cpp says what it prints.

usage: gpu_step.py make WORKLOAD TENSORS            writes the input, the target and the parameters
       gpu_step.py PEER WORKLOAD STEPS TENSORS      PEER: python_bare or python_ddp, over NCCL
"""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "bench"), str(HERE.parent / "parity")]

WARM_UP = 5
COMMUNICATION_TURNS = 10


def make(workload, path):
    import torch
    from tensor_file import Writer
    from workloads import make_workload

    torch.manual_seed(1)
    model, x, target = make_workload(workload)
    with Writer(path) as file:
        file.add("input", x)
        file.add("target", target)
        for index, parameter in enumerate(model.parameters()):
            file.add(f"p{index}", parameter)


def timed(torch, turns, act):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(turns):
        act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / turns


def train(peer, workload, steps, path):
    import torch
    import torch.distributed as dist
    from tensor_file import read
    from workloads import make_workload

    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model, _, _ = make_workload(workload)
    tensors = read(path)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(tensors[f"p{index}"].tensor())
    model.cuda()
    x, target = (tensors[name].tensor().cuda() for name in ("input", "target"))
    parameters = list(model.parameters())
    if peer == "python_ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    # One kernel a parameter, as LibTorch's optimizer.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    losses = []

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for _ in range(WARM_UP):
        step()
    report = {"step_ms": timed(torch, steps, step), "communication_ms": 0.0}
    if peer == "python_ddp":
        message = torch.zeros(sum(p.numel() for p in parameters), device="cuda")
        dist.all_reduce(message, dist.ReduceOp.AVG)
        report["communication_ms"] = timed(
            torch, COMMUNICATION_TURNS, lambda: dist.all_reduce(message, dist.ReduceOp.AVG))
    report["losses"] = [float(f"{loss.item():.9g}") for loss in losses]
    report["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(report))
    dist.destroy_process_group()


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "make":
        make(*sys.argv[2:])
    elif len(sys.argv) == 5 and sys.argv[1] in ("python_bare", "python_ddp"):
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
