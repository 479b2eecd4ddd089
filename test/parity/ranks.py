"""Starts the ranks of one job on this machine, and sees them ended."""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback

PR_SET_PDEATHSIG = 1
# How long the others may take to fail too, once a rank has failed.
GRACE = 10.0


class RanksFailed(Exception):
    pass


def reserve_port():
    """A bound socket that does not listen: nobody else is given its port, and the job's store can bind it."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _enter_rank(rank, world_size, port, log, parent):
    """In the new process: its environment, its output, and that it ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def run_ranks(kinds, body, folder, limit):
    """Calls body(rank) in a forked process for each rank, and returns when all have ended well.

    `kinds`: a letter a rank, for the names of logs and for messages.

    Raises RanksFailed with the end of the failed rank's output: a rank failed, or one still ran after
    `limit` seconds. No process is left then either.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    log_of = [f"{folder}/{rank}.log" for rank in range(len(kinds))]
    running = {}
    failures = []
    with reserve_port() as reserved:
        try:
            for rank in range(len(kinds)):
                pid = os.fork()
                if pid == 0:
                    status = 1
                    try:
                        _enter_rank(rank, len(kinds), reserved.getsockname()[1], log_of[rank], parent)
                        body(rank)
                        status = 0
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        sys.stdout.flush()
                        sys.stderr.flush()
                        os._exit(status)
                running[pid] = rank
            deadline = time.monotonic() + limit
            while running:
                for pid, rank in list(running.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended == 0:
                        continue
                    del running[pid]
                    status = os.waitstatus_to_exitcode(status)
                    if status != 0:
                        how = f"status {status}" if status > 0 else signal.Signals(-status).name
                        failures.append((rank, f"ended with {how}"))
                        deadline = min(deadline, time.monotonic() + GRACE)
                if running and time.monotonic() > deadline:
                    failures.extend((rank, "still ran, and was killed") for rank in running.values())
                    break
                time.sleep(0.01)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if failures:
        text = [f"the job of the ranks {kinds} (P: Python's, C: ours):"]
        for rank, how in failures:
            with open(log_of[rank], encoding="utf-8", errors="replace") as log:
                end = log.read()[-3000:].rstrip()
            text.append(f"  rank {rank} ({kinds[rank]}) {how}; the end of its output:\n{end}")
        raise RanksFailed("\n".join(text))
