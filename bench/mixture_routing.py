"""The cost of your own fit: a step of the paper's first routed layer with three mixture routings, in turns.

python bench/mixture_routing.py                 32 to 32 types, 4 images, float32
python bench/mixture_routing.py --types 8       8 to 8 types

The kernels of EMRouting contain its fit. The second routing has the same fit in torch, on the kernels for any fit. The
third is variational Bayes. Each round measures all in turns. Times are the medians of many rounds, ratios the medians
of the ratios of each round. CPU time is the sum over all threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from tritoncaps import Capsules, Components, ConvCaps2d, EMRouting, MixtureRouting, Moments, VBRouting


@dataclass(frozen=True)
class OwnEM(MixtureRouting):
    """The M-step of EM routing, as a user would write it."""

    parameter_names = ("beta_u", "beta_a")

    def fit(self, moments: Moments, parameters: dict[str, torch.Tensor], iteration: int) -> Components:
        return EMRouting(self.iterations).fit(moments, parameters, iteration)


Times = dict[str, list[float]]
ROUTINGS = {"EMRouting": EMRouting(3), "the same fit in torch": OwnEM(3), "VBRouting": VBRouting(3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", type=int, default=32, help="capsule types of children and parents [%(default)s]")
    parser.add_argument("--images", type=int, default=4, help="images of a batch [%(default)s]")
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds [%(default)s]")
    args = parser.parse_args()
    shape = (args.images, args.types, 14, 14)
    capsules = Capsules(torch.randn(*shape, 4, 4).requires_grad_(), torch.rand(shape).requires_grad_())
    layers = {name: ConvCaps2d(args.types, args.types, 3, stride=2, routing=r) for name, r in ROUTINGS.items()}
    wall, processor = measure({name: step_of(layer, capsules) for name, layer in layers.items()}, args.rounds)
    print(f"{args.types} to {args.types} types, {args.images} images, {torch.get_num_threads()} threads")
    print(
        f"{'a training step with':24} {'wall ms':>9} {'ratio':>6} {'CPU ms':>9} {'ratio':>6} {'kept MiB an image':>18}"
    )
    for name, layer in layers.items():
        times = [f"{median(t[name]) * 1e3:9.1f} {ratio(t[name], t['EMRouting']):6.2f}" for t in (wall, processor)]
        print(f"{name:24} {' '.join(times)} {kept(layer, capsules) / args.images / 2**20:18.2f}")


def step_of(layer: ConvCaps2d, capsules: Capsules) -> Callable[[], None]:
    def step() -> None:
        poses, activations = layer(capsules)
        (poses.sum() + activations.sum()).backward()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> tuple[Times, Times]:
    """Wall time and CPU time of each step in every round. The first call, which may compile, does not count."""
    for step in steps.values():
        step()
    wall: Times = {name: [] for name in steps}
    processor: Times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
    return wall, processor


def ratio(times: list[float], others: list[float]) -> float:
    return median(x / y for x, y in zip(times, others, strict=True))


def kept(layer: ConvCaps2d, capsules: Capsules) -> int:
    """Bytes that autograd keeps between forward and backward pass, including inputs, without parameters."""
    parameters = {x.untyped_storage().data_ptr() for x in layer.parameters()}
    found = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = layer(capsules)
    del outputs
    return sum(found.values())


if __name__ == "__main__":
    main()
