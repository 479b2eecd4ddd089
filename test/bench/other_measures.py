"""What bench.py measures beside training steps."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time


def growth(options, measures):
    """The reducer's cost by the number of parameters."""
    command = [f"{options.bin}/bench_growth", "--rounds", "3" if options.quick else "7"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    print("\ncost of the reducer, a group of one rank")
    print(f"{'parameters':>10} {'bare ms':>9} {'ours ms':>9} {'us for each':>12}")
    costs = []
    for line in output.splitlines():
        count, bare, wrapped = int(line.split()[0]), *map(float, line.split()[1:])
        costs.append((count, wrapped - bare))
        print(f"{count:10} {bare * 1e3:9.3f} {wrapped * 1e3:9.3f} {(wrapped - bare) / count * 1e6:12.3f}")
    for (few, less), (many, more) in zip(costs, costs[1:]):
        measures.add(f"growth: cost of the reducer, {many:,} / {few:,} parameters", more / less, "ratio", 11,
                     at_most=True)


def start(options, measures):
    """From the start of the launcher to the end of the first training step of the MNIST sample's model."""
    here = os.path.dirname(os.path.abspath(__file__))
    arguments = ["digits", "1"]
    torchrun = [options.python, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
                f"{here}/bench_step.py", "python", *arguments]
    ours = [f"{options.bin}/launch", "--nproc_per_node=2", "--use_env", f"{options.bin}/bench_step", "ours_default",
            *arguments]
    times = {"torchrun": [], "launch": []}
    for _ in range(3 if options.quick else 7):
        for name, command in ("torchrun", torchrun), ("launch", ours):
            times[name].append(time_to_first_line(command))
    print("\nfrom the start of the launcher to the end of the first step, 2 ranks, the MNIST sample's model")
    for name, values in times.items():
        print(f"{name:10} {statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f})")
        measures.add(f"start to first step: {name}", statistics.median(values), "s")
    ratio = statistics.median(a / b for a, b in zip(times["torchrun"], times["launch"]))
    measures.add("start to first step: torchrun with Python / ours", ratio, "ratio", 5)


def time_to_first_line(command):
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   env=dict(os.environ, OMP_NUM_THREADS="1"))
        try:
            line = process.stdout.readline()
            seconds = time.perf_counter() - begin
            process.stdout.read()
            status = process.wait(60)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        if not line or status:
            log.seek(0)
            sys.exit(f"bench: {' '.join(command)} ended with {status}\n{log.read().decode(errors='replace')[-2000:]}")
    return seconds


# figure of bench_all_reduce -> what it must at least be
ALL_REDUCE = {"4 KB: Gloo / shm": 50, "1 MB: Gloo / shm": 8, "26 MB: Gloo / shm": 3, "26 MB: copy / shm": 0.6}


def all_reduce(options, measures):
    """Bare all-reduces, Gloo's and through shared memory."""
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        command = [f"{options.bin}/bench_all_reduce", "--rounds", "7", "--json", f"{folder}/figures.json"]
        print(flush=True)
        subprocess.run(command, check=True, timeout=600)
        with open(f"{folder}/figures.json", encoding="utf-8") as file:
            for name, value in json.load(file).items():
                measures.add(f"all-reduce of {name}", value, "ratio", ALL_REDUCE.get(name))


def link(options, measures):
    """Steps of two ranks on nodes of their own, with a link of 1 Gbit/s between them."""
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        print("\ntwo nodes (network namespaces), a link of 1 Gbit/s", flush=True)
        done = subprocess.run(
            [f"{here}/link.sh", "1gbit", sys.executable, f"{here}/bench.py", "--on-link", "--turns", str(options.turns),
             "--bin", options.bin, "--python", options.python, "--json", f"{folder}/figures.json"],
            check=False, timeout=1200)
        if done.returncode == 77:
            return
        if done.returncode:
            sys.exit(f"bench: the part link ended with {done.returncode}")
        with open(f"{folder}/figures.json", encoding="utf-8") as file:
            measures.rows += json.load(file)["measures"]
