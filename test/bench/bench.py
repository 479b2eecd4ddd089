"""Times training steps of ddp beside those of its peers, and prints tables of times and ratios.

usage: bench.py [--quick] [--parts P,...] [--workloads W,...] [--json FILE] [--bin FOLDER] [--python PYTHON]

All peers' processes of a workload live through its run and wait for their turn, so that only one peer works at
a time: A B C ..., A B C ... A turn is some steps; its figure is that of the slower rank, and a peer's the
median of its turns. Machines are shared and noisy: the ratios are the result, each the median of the ratios
of turns of the same round. Processor time and page faults, per step and rank, say where the time goes, and
are less easily disturbed. One thread a rank.

Writes {"machine": ..., "measures": [{"name", "value", "unit", "target", "met"}]}.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import other_measures

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PR_SET_PDEATHSIG = 1

# name -> what it is
PEERS = {
    "ours_default": "ours, default backend, bucket view",
    "ours": "ours over Gloo",
    "ours_bucket_view": "ours over Gloo, bucket view",
    "python": "Python's DDP (Gloo)",
    "python_bucket_view": "Python's DDP (Gloo), bucket view",
    "bare": "bare, unconnected",
    "c10d_reducer": "c10d::Reducer from C++ (Gloo)",
    "hand_written": "hand-written loop, wait for each",
    "hand_written_async": "hand-written loop, issue all",
}
ALL = tuple(PEERS)
# Of the part "link" alone.
PEERS |= {"ours_fp16": "ours over Gloo, bucket view, fp16", "forward": "the forward alone",
          "communication": "the all-reduces alone"}
LINK = ("forward", "bare", "communication", "ours_bucket_view", "ours_fp16", "python_bucket_view")
SOME = ("ours_default", "ours_bucket_view", "python", "python_bucket_view", "bare")
# name -> (what it is, peers, steps in a turn, MB of gradients)
WORKLOADS = {
    "mlp": ("12 layers of 1024 x 1024, batch 32", ALL, 5, 4 * 12 * (1024 * 1024 + 1024) / 1e6),
    "deep": ("400 layers of 32 x 32, batch 8", ALL, 5, 4 * 400 * (32 * 32 + 32) / 1e6),
    "transformer": ("4 encoder layers of width 512, 12.6 M parameters", SOME, 2, 4 * 4 * 3152384 / 1e6),
    "resnet50": ("ResNet-50's parameter shapes, 4 images of 32 x 32", SOME, 1, 4 * 25557032 / 1e6),
    "embedding": ("embedding 100,000 x 64 with sparse gradient, linear", SOME, 20, None),
}
# measure -> (workload, peer, over, bound); a bound above 1 of a peer over ours is "at least", of ours over bare "at most"
RATIOS = {
    "MLP, default backends: Python's DDP default / ours": ("mlp", "python", "ours_default", 1.8),
    "MLP, default backends: Python's DDP best options / ours": ("mlp", "python_bucket_view", "ours_default", 1.4),
    "MLP, both over Gloo, default options: Python's DDP / ours": ("mlp", "python", "ours", 1.05),
    "MLP, both over Gloo, best options: Python's DDP / ours": ("mlp", "python_bucket_view", "ours_bucket_view", 1.05),
    "MLP, over Gloo: hand-written loop / ours": ("mlp", "hand_written", "ours", 1.2),
    "deep, over Gloo: hand-written loop / ours": ("deep", "hand_written", "ours", 5.0),
    "MLP, default backend: ours / bare x2": ("mlp", "ours_default", "bare", 1.35),
    "deep, default backend: ours / bare x2": ("deep", "ours_default", "bare", 1.25),
    "transformer, default backends: Python's DDP / ours": ("transformer", "python_bucket_view", "ours_default", 1.4),
    "ResNet-50 shapes, default backends: Python's DDP / ours": ("resnet50", "python_bucket_view", "ours_default", 1.4),
}


class Peer:
    """The processes of one peer, one a rank."""

    def __init__(self, name, command, ranks, folder, limit, on_nodes=False):
        self.name = name
        self.ranks = ranks
        self.limit = limit
        self.processes = []
        self.logs = []
        self._libc = ctypes.CDLL(None)
        # Bound and not listening: nobody else is given the port, and rank 0's store can bind it.
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        for rank in range(ranks):
            environment = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._reserved.getsockname()[1]), OMP_NUM_THREADS="1",
                GLOO_SOCKET_IFNAME="lo")
            if on_nodes:  # link.sh has made them
                environment.update(MASTER_ADDR="10.77.0.1", GLOO_SOCKET_IFNAME="eth0")
            log = open(f"{folder}/{name}.{rank}.log", "w+", encoding="utf-8", errors="replace")
            self.logs.append(log)
            self.processes.append(subprocess.Popen(
                (["ip", "netns", "exec", f"node{rank}"] if on_nodes else []) + command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                bufsize=0, preexec_fn=lambda: self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)))

    def answers(self):
        """A line of each rank, within the limit."""
        lines = [b""] * self.ranks
        deadline = time.monotonic() + self.limit
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    self.fail(f"no answer within {self.limit:.0f} s")
                for key, _ in ready:
                    part = os.read(key.fd, 4096)
                    if not part:
                        self.fail(f"rank {key.data} ended")
                    lines[key.data] += part
                    if lines[key.data].endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [line.decode().strip() for line in lines]

    def turn(self, steps):
        for process in self.processes:
            process.stdin.write(f"{steps}\n".encode())
        return max(float(answer) for answer in self.answers())

    def usage(self):
        """Seconds of processor time and page faults of all ranks so far."""
        seconds, faults = 0.0, 0
        for process in self.processes:
            with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            faults += int(fields[7])
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds, faults

    def peak_memory(self):
        """MB, of the rank that needs most."""
        peaks = []
        for process in self.processes:
            with open(f"/proc/{process.pid}/status", encoding="ascii", errors="replace") as file:
                peaks += [int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
        return max(peaks) / 1e3

    def fail(self, what):
        text = f"bench: {self.name}: {what}"
        for rank, log in enumerate(self.logs):
            log.seek(0)
            text += f"\n  rank {rank}: {log.read()[-2000:].rstrip()}"
        raise SystemExit(text)

    def close(self):
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + 10
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        for log in self.logs:
            log.close()
        self._reserved.close()


def machine():
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()}"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps: under two minutes")
    parser.add_argument("--turns", type=int, help="of each peer (default: 15; quick: 7)")
    parser.add_argument("--steps", type=int, help="in a turn (default: by workload; quick: half of it)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", help=f"which, and in which order (default: {', '.join(PARTS)}; quick: without {' and '.join(SLOW)})")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, and in which order")
    parser.add_argument("--peers", help="which, and in which order (default: by workload)")
    parser.add_argument("--json", help="where to write the measures")
    parser.add_argument("--bin", default=f"{ROOT}/build/release/bin", help="where the C++ programs are")
    parser.add_argument("--on-link", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--python", default=f"{ROOT}/.deps/venv/bin/python", help="has the torch of Python's peers")
    options = parser.parse_args()
    options.turns = options.turns or (7 if options.quick else 15)
    options.parts = options.parts.split(",") if options.parts else [name for name in PARTS if not (options.quick and name in SLOW)]
    options.workloads = options.workloads.split(",")
    options.peers = options.peers and options.peers.split(",")
    for kind, names, known in ("part", options.parts, PARTS), ("workload", options.workloads, WORKLOADS), ("peer", options.peers or [], PEERS):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    return options


class Result:
    """By peer: the seconds of a step in each turn; processor seconds and page faults per step and rank; peak MB."""

    def __init__(self):
        self.times, self.usage, self.memory = {}, {}, {}

    def ratio(self, peer, over, less=None):
        """The median of peer / over by rounds, both less the time of a third one."""
        base = self.times[less] if less else [0] * len(self.times[peer])
        return statistics.median((a - c) / (b - c) for a, b, c in zip(self.times[peer], self.times[over], base))


def measure(options, workload, names=None, on_nodes=False):
    _, known, steps, _ = WORKLOADS[workload]
    names = names or options.peers or known
    steps = options.steps or (max(1, steps // 2) if options.quick else steps)
    result = Result()
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder, contextlib.ExitStack() as stack:
        peers = []
        for name in names:
            is_python = name.startswith("python")
            command = [options.python, f"{HERE}/bench_step.py"] if is_python else [f"{options.bin}/bench_step"]
            peer = Peer(name, command + [name, workload], options.ranks, folder, 120, on_nodes)
            stack.callback(peer.close)
            peer.answers()  # one after the other: their start would only disturb each other
            peers.append(peer)
        for peer in peers:
            peer.turn(3)  # the layout of the buckets is final from the second step on
        before = {peer.name: peer.usage() for peer in peers}
        result.times = {peer.name: [] for peer in peers}
        for _ in range(options.turns):
            for peer in peers:
                result.times[peer.name].append(peer.turn(steps))
        for peer in peers:
            count = options.turns * steps * options.ranks
            result.usage[peer.name] = [(now - then) / count for now, then in zip(peer.usage(), before[peer.name])]
            result.memory[peer.name] = peer.peak_memory()
    return result


def print_table(options, workload, result):
    print(f"\n{workload}: {WORKLOADS[workload][0]}; {options.ranks} ranks")
    references = [name for name in ("bare", "ours_default", "ours_bucket_view") if name in result.times]
    print(f"{'a step':36} {'median ms':>9} {'min':>7} {'max':>7} {'CPU ms':>7} {'faults':>7} {'peak MB':>8}"
          + "".join(f" {'/ ' + name.replace('_', ' '):>18}" for name in references))
    for name, values in result.times.items():
        seconds, faults = result.usage[name]
        print(f"{PEERS[name]:36} {statistics.median(values) * 1e3:9.2f} {min(values) * 1e3:7.2f} "
              f"{max(values) * 1e3:7.2f} {seconds * 1e3:7.1f} {faults:7.0f} {result.memory[name]:8.0f}"
              + "".join(f" {result.ratio(name, reference):18.2f}" for reference in references))


class Measures:
    def __init__(self):
        self.rows = []

    def add(self, name, value, unit, bound=None, at_most=False):
        met = None if bound is None else (value <= bound if at_most else value >= bound)
        target = None if bound is None else f"{'<=' if at_most else '>='} {bound}"
        self.rows.append({"name": name, "value": round(value, 4), "unit": unit, "target": target, "met": met})

    def print(self):
        print()
        for row in self.rows:
            if row["target"]:
                print(f"{row['name']}: {row['value']:.3f} {row['unit']} (target {row['target']}: "
                      f"{'met' if row['met'] else 'missed'})")


def add_measures(measures, workload, result):
    for name, values in result.times.items():
        what = f"{workload}: {PEERS[name]}"
        seconds, faults = result.usage[name]
        measures.add(f"step, {what}", statistics.median(values) * 1e3, "ms")
        measures.add(f"processor time of a step, {what}", seconds * 1e3, "ms")
        measures.add(f"page faults of a step, {what}", faults, "pages")
        measures.add(f"peak memory, {what}", result.memory[name], "MB")
    for name, (of, peer, over, bound) in RATIOS.items():
        if of == workload and peer in result.times and over in result.times:
            measures.add(name, result.ratio(peer, over), "ratio", bound, at_most=over == "bare")
    if workload == "deep" and {"ours_bucket_view", "c10d_reducer", "bare"} <= set(result.times):
        measures.add("deep, over Gloo: (ours - bare) / (c10d::Reducer - bare)",
                     result.ratio("ours_bucket_view", "c10d_reducer", less="bare"), "ratio", 0.7, at_most=True)
        hooks = 800
        measures.add("deep: cost of a hook, ours - bare",
                     statistics.median(a - b for a, b in zip(result.times["ours_bucket_view"], result.times["bare"]))
                     / hooks * 1e6, "us")
    gradients = WORKLOADS[workload][3]
    if gradients and {"ours_bucket_view", "bare"} <= set(result.memory):
        measures.add(f"{workload}: peak memory over bare / gradients, over Gloo",
                     (result.memory["ours_bucket_view"] - result.memory["bare"]) / gradients, "ratio", 1.05,
                     at_most=True)


def steps(options, measures):
    for workload in options.workloads:
        result = measure(options, workload)
        print_table(options, workload, result)
        add_measures(measures, workload, result)
        sys.stdout.flush()


def on_link(options, measures):
    """The part "link", where link.sh has made the nodes."""
    result = measure(options, "mlp", LINK, on_nodes=True)
    print_table(options, "mlp", result)
    times = result.times
    for name, bound in ("ours_bucket_view", 1.15), ("python_bucket_view", None):
        floor = [forward + max(bare - forward, alone)
                 for forward, bare, alone in zip(times["forward"], times["bare"], times["communication"])]
        measures.add(f"1 Gbit/s, 2 nodes: {PEERS[name]} / (forward + larger of backward and communication)",
                     statistics.median(a / b for a, b in zip(times[name], floor)), "ratio", bound, at_most=True)
    measures.add("1 Gbit/s, 2 nodes: ours with fp16 compression / without",
                 result.ratio("ours_fp16", "ours_bucket_view"), "ratio", 0.65, at_most=True)
    measures.add("1 Gbit/s, 2 nodes: Python's DDP / ours", result.ratio("python_bucket_view", "ours_bucket_view"), "ratio")


def ranks(options, measures):
    """More ranks than cores: all of them computing at once, with communication and without."""
    for count in 2, 4, 8:
        result = measure(argparse.Namespace(**{**vars(options), "ranks": count}), "mlp", ("ours_default", "bare"))
        print_table(argparse.Namespace(ranks=count), "mlp", result)
        measures.add(f"MLP, {count} ranks on {machine()['cores']} cores: ours / bare x{count}",
                     result.ratio("ours_default", "bare"), "ratio")


PARTS = {"steps": steps, "all_reduce": other_measures.all_reduce, "growth": other_measures.growth,
         "start": other_measures.start, "link": other_measures.link,
         "ranks": ranks}
SLOW = ("link", "ranks")


def main():
    options = parse_arguments()
    for path in (f"{options.bin}/bench_step", options.python):
        if not os.access(path, os.X_OK):
            raise SystemExit(f"bench: there is no {path}; build it, or name another place with --bin or --python")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    where = machine()
    if not options.on_link:
        print(f"{where['cpu']}, {where['cores']} cores, load {where['load']} before; {options.turns} turns of each peer")
    measures = Measures()
    for part in [on_link] if options.on_link else [PARTS[name] for name in options.parts]:
        part(options, measures)
        sys.stdout.flush()
    if not options.on_link:
        measures.print()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": where, "measures": measures.rows}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
