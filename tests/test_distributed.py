"""Two processes train like one: DDP, FSDP2, and checkpoints that another number of processes can load."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

COMMON = """
import gc, os, sys, torch, torch.distributed as dist
from tritoncaps.models import MatrixCapsNet
from tritoncaps import SpreadLoss

def model():
    torch.manual_seed(0)
    return MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2, dtype=torch.float64)

def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 1, 17, 17, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 3])

def threads_of_gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]

def step(net, images, labels):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    SpreadLoss()(net(images).activations, labels).backward()
    optimizer.step()
"""

ONE = (
    COMMON
    + """
net = model()
step(net, *batch())
torch.save(net.state_dict(), sys.argv[1])
"""
)

DDP = (
    COMMON
    + """
from torch import _dynamo  # imported later, dynamo would keep the process group
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(model())
images, labels = batch()
step(net, images[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2])
if rank == 0:
    torch.save(net.module.state_dict(), sys.argv[1])
dist.barrier()  # no process ends while another one still communicates with it
del net
gc.collect()  # nothing refers to the process group any more: its threads end here, not with the interpreter
dist.destroy_process_group()
assert not threads_of_gloo()
"""
)

FSDP = (
    COMMON
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
dist.init_process_group("gloo")
rank, net = dist.get_rank(), model()
for layer in (net.primary, net.conv_caps1, net.conv_caps2, net.class_caps):
    fully_shard(layer)
fully_shard(net)
images, labels = batch()
step(net, images[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2])
dcp.save(get_model_state_dict(net), checkpoint_id=sys.argv[2])
whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(whole, sys.argv[1])
dist.barrier()  # no process ends while another one still communicates with it
dist.destroy_process_group()
os._exit(0)  # FSDP keeps the process group; its threads could abort the process when the interpreter ends
"""
)


def launch(code, processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = arguments[0].with_suffix(".py")
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), *map(str, arguments)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(arguments[0], weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The state after one step of one process on the whole batch."""
    return launch(ONE, 1, tmp_path_factory.mktemp("one") / "state.pt")


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def test_ddp(alone, tmp_path):
    assert_same(launch(DDP, 2, tmp_path / "state.pt"), alone)


def test_fsdp_and_a_checkpoint_for_another_number_of_processes(alone, tmp_path):
    import torch.distributed.checkpoint as dcp

    from tritoncaps.models import MatrixCapsNet

    assert_same(launch(FSDP, 2, tmp_path / "state.pt", tmp_path / "sharded"), alone)
    net = MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2, dtype=torch.float64)
    state = net.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert_same(state, alone)
