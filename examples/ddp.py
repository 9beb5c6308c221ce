"""DistributedDataParallel: each process trains on a part of the batch.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
import toy_data
from cifar_cnn import network
from torch import _dynamo  # noqa: F401  imported after init_process_group, it would keep the group and its threads
from torch.nn.parallel import DistributedDataParallel

from tritoncaps import SpreadLoss


def main(steps=5):
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = network(num_classes=3).to(device)
    # batch normalisation uses the part of each process; the loss uses all parameters, though not the class poses
    model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
    loss, optimiser = SpreadLoss(0.5).to(device), torch.optim.Adam(model.parameters(), lr=5e-3)
    images, labels = (x.to(device) for x in toy_data.images(64, seed=rank))
    for _ in range(steps):
        optimiser.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        optimiser.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(processes)]
    dist.all_gather(everywhere, weights)
    if rank == 0:
        same = all(torch.equal(weights, other) for other in everywhere)
        print(f"{processes} processes, loss {value.item():.3f}, all have the same weights: {same}")
    del model  # it refers to the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
