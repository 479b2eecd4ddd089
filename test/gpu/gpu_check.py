"""Runs what scripts/gpu_check.sh has built, and writes its report.

usage: gpu_check.py BIN OUTPUT [--minutes N]    runs on this machine's GPU; writes OUTPUT/gpu_check.json and .txt
       gpu_check.py --table REPORT.json         prints the table of a report

Status 1 where a test failed, or losses that must be equal are not.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKLOADS = {"mlp": 100, "transformer": 50, "resnet50": 50}
PEERS = ("bare", "ddp", "python_bare", "python_ddp")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment():
    return {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def run(command, deadline, **options):
    """Status, standard output and the end of standard error; status -1 at the deadline."""
    left = max(1, deadline - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False, **options)
    except subprocess.TimeoutExpired:
        return -1, "", "not done in time"
    return done.returncode, done.stdout, done.stderr[-2000:]


def step_report(program, peer, workload, tensors, deadline):
    status, out, err = run([*program, peer, workload, str(WORKLOADS[workload]), tensors], deadline, env=environment())
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if status == 0 and lines else {"error": err or f"status {status}"}


def measure(binaries, deadline):
    rows = {}
    with tempfile.TemporaryDirectory() as work:
        for workload in WORKLOADS:
            tensors = f"{work}/{workload}"
            subprocess.run([sys.executable, HERE / "gpu_step.py", "make", workload, tensors], check=True)
            rows[workload] = {}
            for peer in PEERS:
                program = [sys.executable, HERE / "gpu_step.py"] if peer.startswith("python") else [binaries / "gpu_step"]
                rows[workload][peer] = step_report(program, peer, workload, tensors, deadline)
    return rows


def hidden_share(bare, wrapped):
    """The share of the communication that did not lengthen the step."""
    alone = wrapped["communication_ms"]
    return None if alone <= 0 else max(0.0, min(1.0, (bare["step_ms"] + alone - wrapped["step_ms"]) / alone))


def compare(rows):
    """For each workload whether all losses are equal, to the last bit of their single precision."""
    return {workload: all("losses" in peers[peer] and peers[peer]["losses"] == peers["bare"].get("losses") for peer in PEERS)
            for workload, peers in rows.items()}


def device_lines():
    status, out, _ = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], time.monotonic() + 20)
    return out.strip().splitlines() if status == 0 else []


def table(report):
    lines = [f"devices: {'; '.join(report['devices']) or 'unknown'}",
             f"LibTorch {report['libtorch']}, world size 1 over NCCL", "",
             f"{'workload':<12}{'peer':<14}{'step time (ms)':>16}{'communication (ms)':>20}{'hidden':>9}{'peak (MiB)':>12}  losses"]
    for workload, peers in report["steps"].items():
        for peer, row in peers.items():
            if "error" in row:
                lines.append(f"{workload:<12}{peer:<14}  failed: {row['error'].strip().splitlines()[-1]}")
                continue
            base = peers.get("python_bare" if peer.startswith("python") else "bare", {})
            share = hidden_share(base, row) if "step_ms" in base else None
            equal = "as bare" if row["losses"] == peers["bare"].get("losses") else "DIFFER"
            lines.append(f"{workload:<12}{peer:<14}{row['step_ms']:>16.3f}{row['communication_ms']:>20.3f}"
                         f"{'' if share is None else f'{share:.0%}':>9}{row['peak_bytes'] / 2**20:>12.1f}  {equal}")
    lines += ["", "tests:"]
    lines += [f"  {name:<24}{'passed' if test['passed'] else 'FAILED'}  {test['seconds']:.0f} s" for name, test in report["tests"].items()]
    return "\n".join(lines) + "\n"


def run_tests(binaries, deadline):
    tests = {}
    commands = {"test_gpu": [binaries / "test_gpu"]}
    if (binaries / "launch").exists() and (binaries / "mnist").exists():
        commands["mnist over NCCL"] = [binaries / "launch", "--nproc-per-node=1", binaries / "mnist", "--backend", "nccl",
                                       "--epochs", "1", "--data", HERE.parent.parent / "data/mnist"]
    for name, command in commands.items():
        start = time.monotonic()
        status, out, err = run(command, deadline)
        tests[name] = {"passed": status == 0, "seconds": time.monotonic() - start,
                       "output": "" if status == 0 else (out[-4000:] + err)}
    return tests


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", nargs="?", type=pathlib.Path)
    parser.add_argument("output", nargs="?", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--table", type=pathlib.Path)
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())), end="")
        return 0
    deadline = time.monotonic() + 60 * given.minutes
    import torch
    report = {"devices": device_lines(), "libtorch": torch.__version__,
              "tests": run_tests(given.bin, deadline), "steps": measure(given.bin, deadline)}
    report["losses_equal"] = compare(report["steps"])
    (given.output / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.output / "gpu_check.txt").write_text(table(report))
    print(table(report), end="")
    for name, test in report["tests"].items():
        if not test["passed"]:
            print(f"\n{name}:\n{re.sub(r'^', '  ', test['output'], flags=re.M)}")
    return 0 if all(test["passed"] for test in report["tests"].values()) and all(report["losses_equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
