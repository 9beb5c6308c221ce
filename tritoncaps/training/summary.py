"""Summary of a network: shapes, parameters and votes of each layer, and the memory that stored votes would need."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps._internal.memory import peak_bytes
from tritoncaps.capsules import Capsules
from tritoncaps.training.networks import Task

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Layer:
    """A layer. ``votes``: number of votes for one image; ``vote_bytes``: memory that storing them once would need."""

    name: str
    kind: str
    output: list[list[int]]
    parameters: int
    votes: int
    vote_bytes: int


@dataclass(frozen=True)
class Summary:
    """A network. ``kept_bytes``: measured memory that autograd keeps for the backward pass of a batch, without
    parameters. ``peak_bytes``: peak memory of a training step, without parameters and images, with all gradients."""

    layers: list[Layer]
    parameters: int
    votes: int
    vote_bytes: int
    kept_bytes: int
    peak_bytes: int
    images: int = 1  # of the batch

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'layer':<14}{'kind':<20}{'output of one image':<38}{'parameters':>12}{'votes':>12}"]
        for layer in self.layers:
            shape = " and ".join(str(s) for s in layer.output)
            votes = f"{layer.votes:,}" if layer.votes else ""
            lines.append(f"{layer.name:<14}{layer.kind:<20}{shape:<38}{layer.parameters:>12,}{votes:>12}")
        lines.append(f"{'all':<72}{self.parameters:>12,}{self.votes:>12,}")
        images = "one image" if self.images == 1 else f"{self.images} images"
        lines.append(f"memory kept for the backward pass of {images}: {_mib(self.kept_bytes)}, measured")
        lines.append(
            f"peak memory of a training step with {images}: {_mib(self.peak_bytes)} above parameters, measured"
        )
        if self.votes:
            lines.append(f"storing the votes of one image once would need {_mib(self.vote_bytes)} more")
        return "\n".join(lines)


def summarise(network: nn.Module, task: Task, batch_size: int = 1) -> Summary:
    """Run some images through the network, and through its decoder if it has one. Then run a training step."""
    layers: list[Layer] = []
    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: layers.append(_layer(name, m, i, o)))
        for name, module in _leaves(network)
    ]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    training = network.training
    network.eval()  # a norm needs more than one image in training
    image = torch.randn(batch_size, task.channels, task.height, task.width, generator=torch.Generator().manual_seed(0))

    def forward() -> list[Tensor]:
        outputs = network(image)
        found = list(outputs) if isinstance(outputs, tuple) else [outputs]
        if getattr(network, "decoder", None) is not None:
            found.append(network.reconstruct(outputs))  # type: ignore[operator]
        return found

    def step() -> None:
        trained = [p for p in network.parameters() if p.requires_grad]
        torch.autograd.grad([x.sum() for x in forward()], trained, allow_unused=True)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    for hook in hooks:
        hook.remove()
    peak = peak_bytes(step)
    network.train(training)
    for parameter in network.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    parameters = sum(p.numel() for p in network.parameters())
    votes, vote_bytes = (sum(getattr(layer, key) for layer in layers) for key in ("votes", "vote_bytes"))
    return Summary(layers, parameters, votes, vote_bytes, sum(kept.values()), peak, batch_size)


def _leaves(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children of the network, and those of an nn.Sequential."""
    found = []
    for name, module in network.named_children():
        if isinstance(module, nn.Sequential):
            found += [(f"{name}.{i}", layer) for i, layer in enumerate(module) if list(layer.parameters())]
        else:
            found.append((name, module))
    return found


def _layer(name: str, module: nn.Module, inputs: Any, outputs: Any) -> Layer:
    shapes = [list(x.shape[1:]) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]
    votes, size = _votes(module, inputs[0])
    parameters = sum(p.numel() for p in module.parameters())
    return Layer(name, type(module).__name__, shapes, parameters, votes, votes * size * FLOAT)


def _votes(module: nn.Module, capsules: Capsules | Tensor) -> tuple[int, int]:
    """Number of votes of a layer for one image, and number of entries of a vote."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(capsules, Tensor):
        return 0, 0
    pairs = int(module.in_caps * module.out_caps)  # type: ignore[operator]
    size = prod(capsules[0].shape[-2:]) if hasattr(module, "beta_u") else int(weight.shape[-1])
    if not hasattr(module, "routing_map"):  # fully connected
        return pairs, size
    return pairs * module.routing_map(capsules[1].shape[2:]).num_edges, size  # type: ignore[operator]


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
