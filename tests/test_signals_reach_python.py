"""Ctrl-C works while kernels run. Other signals are handled too, and the kernels then continue."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numba
import numpy as np
import pytest
import torch

from tritoncaps.kernels.common.cpu import threads as pool
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task

FOREVER = 1 << 38  # tasks, which would take a day
EDGES = (np.zeros(1),)  # the kernels of this file do not use it


@numba.njit(nogil=True)
def count(counter, tasks, edges, done):
    """done[task % entries] += 1: count the tasks of each entry."""
    task = first_task(counter, tasks)
    while task < tasks:
        done[task % len(done)] += 1
        task = next_task(counter, tasks)


@numba.njit(nogil=True)
def double(counter, tasks, edges, done):
    """Doubles the results of `count`, so it needs all of them."""
    task = first_task(counter, tasks)
    while task < tasks:
        done[task] *= 2
        task = next_task(counter, tasks)


@pytest.fixture(autouse=True, params=[1, 3])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore Ctrl-C
    pool.run(count, 1000, EDGES, np.zeros(1, np.int64))  # start the threads of the pool
    yield
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(before)


def send(number, done):
    """Send a signal while kernels run, also in the main thread."""

    def wait():
        while not done.any():
            time.sleep(0.001)
        time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait).start()


def test_ctrl_c_ends_a_call_that_would_take_a_day():
    done = np.zeros(1, np.int64)
    send(signal.SIGINT, done)
    with pytest.raises(KeyboardInterrupt):
        pool.run(count, FOREVER, EDGES, done)
    after = done.copy()
    time.sleep(0.05)
    assert np.array_equal(done, after)  # other threads have left it too
    few = np.zeros(100, np.int64)
    pool.run(count, 100, EDGES, few)  # and can run the next kernel
    assert (few == 1).all()


def test_every_task_is_done_once_however_many_signals_come():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    try:
        while len(seen) < 20:
            done = np.zeros(2_000_000, np.int64)
            plan = pool.Plan()
            plan.add(count, len(done), EDGES, done)
            plan.add(double, len(done), EDGES, done)
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            plan.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (done == 2).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_asyncio_hears_signals_that_come_while_kernels_run():
    """asyncio has its own socket for signals."""

    async def listen():
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        done = np.zeros(3_000_000, np.int64)
        send(signal.SIGUSR1, done)
        pool.run(count, len(done), EDGES, done)
        await asyncio.wait_for(heard.wait(), 60)
        assert (done == 1).all()

    asyncio.run(listen())


def test_a_forked_process_has_watch_of_its_own():
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_signals_reach_python import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "pool.run(count, 1, EDGES, np.zeros(1, np.int64))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    done = np.zeros(1, np.int64); send(signal.SIGINT, done)\n"
        "    try: pool.run(count, FOREVER, EDGES, done)\n"
        "    except KeyboardInterrupt: os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "7", done.stderr
