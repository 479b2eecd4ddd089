"""Times one training step of ddp beside that of its peers: 12 layers of 1024 x 1024, batch 32, 2 ranks,
Gloo, one thread a rank.

usage: bench.py [--quick] [--json FILE] [--program BENCH_STEP] [--python PYTHON]

All peers' processes live through the whole run and wait for their turn, so that only one peer works at a
time: A B C ..., A B C ... A turn is some steps; its figure is that of the slower rank, and a peer's the
median of its turns. Machines are shared and noisy: the ratios are the result, each the median of the ratios
of turns of the same round. Processor time and page faults, per step and rank, say where the time goes, and
are less easily disturbed.

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

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
RANKS = 2
PR_SET_PDEATHSIG = 1

# name -> what it is
PEERS = {
    "ours": "ours",
    "ours_bucket_view": "ours, bucket view",
    "python": "Python's DDP",
    "python_bucket_view": "Python's DDP, bucket view",
    "bare": "bare x2 (unconnected)",
    "hand_written": "hand-written, wait for each",
    "hand_written_async": "hand-written, issue all",
}
# measure -> (peer, over, at least)
RATIOS = {
    "step over Gloo: Python's DDP / ours, default options": ("python", "ours", 1.0),
    "step over Gloo: Python's DDP / ours, best options of both": ("python_bucket_view", "ours_bucket_view", 1.0),
    "step over Gloo: hand-written loop / ours": ("hand_written", "ours", 1.2),
}


class Peer:
    """The processes of one peer, one a rank."""

    def __init__(self, name, command, folder, limit):
        self.name = name
        self.limit = limit
        self.processes = []
        self.logs = []
        self._libc = ctypes.CDLL(None)
        # Bound and not listening: nobody else is given the port, and rank 0's store can bind it.
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        for rank in range(RANKS):
            environment = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._reserved.getsockname()[1]), OMP_NUM_THREADS="1",
                GLOO_SOCKET_IFNAME="lo")
            log = open(f"{folder}/{name}.{rank}.log", "w+", encoding="utf-8", errors="replace")
            self.logs.append(log)
            self.processes.append(subprocess.Popen(
                command + [name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                bufsize=0, preexec_fn=lambda: self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)))

    def answers(self):
        """A line of each rank, within the limit."""
        lines = [b""] * RANKS
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
    parser.add_argument("--quick", action="store_true", help="fewer steps: under a minute")
    parser.add_argument("--turns", type=int, help="of each peer (default: 15; quick: 7)")
    parser.add_argument("--steps", type=int, help="in a turn (default: 5; quick: 3)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, and in which order")
    parser.add_argument("--json", help="where to write the measures")
    parser.add_argument("--program", default=f"{ROOT}/build/release/bin/bench_step", help="the C++ peers")
    parser.add_argument("--python", default=f"{ROOT}/.deps/venv/bin/python", help="has the torch of Python's peers")
    options = parser.parse_args()
    options.turns = options.turns or (7 if options.quick else 15)
    options.steps = options.steps or (3 if options.quick else 5)
    options.peers = options.peers.split(",")
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return options


def measure(options):
    """By peer: the seconds of a step in each turn; processor seconds and page faults per step and rank."""
    times = {name: [] for name in options.peers}
    usage = {}
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder, contextlib.ExitStack() as stack:
        peers = []
        for name in options.peers:
            is_python = name.startswith("python")
            command = [options.python, f"{HERE}/bench_step.py"] if is_python else [options.program]
            peer = Peer(name, command, folder, limit=120)
            stack.callback(peer.close)
            peer.answers()  # one after the other: their start would only disturb each other
            peers.append(peer)
        for peer in peers:
            peer.turn(3)  # the layout of the buckets is final from the second step on
        before = {peer.name: peer.usage() for peer in peers}
        for _ in range(options.turns):
            for peer in peers:
                times[peer.name].append(peer.turn(options.steps))
        for peer in peers:
            count = options.turns * options.steps * RANKS
            usage[peer.name] = [(now - then) / count for now, then in zip(peer.usage(), before[peer.name])]
    return times, usage


def ratio(times, peer, over):
    return statistics.median(a / b for a, b in zip(times[peer], times[over]))


def main():
    options = parse_arguments()
    for path in (options.program, options.python):
        if not os.access(path, os.X_OK):
            raise SystemExit(f"bench: there is no {path}; build it, or name another with --program or --python")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    where = machine()
    times, usage = measure(options)

    print(f"{where['cpu']}, {where['cores']} cores, load {where['load']} before; {options.turns} turns of "
          f"{options.steps} steps each")
    references = [name for name in ("bare", "ours", "ours_bucket_view") if name in times]
    print(f"{'a step, 2 ranks over Gloo':28} {'median ms':>9} {'min':>6} {'max':>6} {'CPU ms':>7} {'faults':>7}"
          + "".join(f" {'/ ' + name.replace('_', ' '):>18}" for name in references))
    measures = []
    for name, values in times.items():
        median = statistics.median(values)
        seconds, faults = usage[name]
        print(f"{PEERS[name]:28} {median * 1e3:9.1f} {min(values) * 1e3:6.1f} {max(values) * 1e3:6.1f} "
              f"{seconds * 1e3:7.1f} {faults:7.0f}"
              + "".join(f" {ratio(times, name, reference):18.2f}" for reference in references))
        for what, value, unit in (("step", median * 1e3, "ms"), ("processor time of a step", seconds * 1e3, "ms"),
                                  ("page faults of a step", faults, "pages")):
            measures.append({"name": f"{what} over Gloo: {PEERS[name]}", "value": round(value, 3), "unit": unit,
                             "target": None, "met": None})
    for name, (peer, over, bound) in RATIOS.items():
        if peer in times and over in times:
            value = ratio(times, peer, over)
            measures.append({"name": name, "value": round(value, 3), "unit": "ratio", "target": f">= {bound}",
                             "met": value >= bound})
            print(f"{name}: {value:.2f} (target >= {bound}: {'met' if value >= bound else 'missed'})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": where, "measures": measures}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
