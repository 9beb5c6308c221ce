"""How good a network is on a data set: accuracy, confusion of classes, and accuracy by any factor of variation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tritoncaps.data import ImageSet, MultiMNIST, Pipeline, familiar_views
from tritoncaps.training.distributed import World
from tritoncaps.training.objective import class_scores, correct
from tritoncaps.waiting import waiting

BATCH = 128


class Evaluation(NamedTuple):
    """``right`` [N]: which images are; ``confusion`` [true, predicted] counts; None where images have two classes."""

    accuracy: float
    right: Tensor
    confusion: Tensor | None

    def by(self, values: Tensor) -> dict[int, float]:
        """Accuracy for each value of a factor [N]."""
        return {int(v): self.right[values == v].float().mean().item() for v in values.unique()}


def evaluate(
    network: nn.Module,
    data: ImageSet | MultiMNIST,
    pipeline: Pipeline,
    world: World,
    crops: int = 1,
    amp: str = "none",
    workers: int = 0,
) -> Evaluation:
    """All images, in turn over all processes; predictions are averaged over ``crops``."""
    was_training = network.training
    network.eval()
    right = torch.zeros(len(data), dtype=torch.long, device=world.device)
    classes = len(data.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.long, device=world.device)
    multiple = False
    with torch.no_grad(), autocast(world.device, amp):
        count = -(-len(data) // (BATCH * world.size))
        for indices, images, labels in waiting("testing", _batches(data, world, workers), count):
            scores = torch.stack([class_scores(network(crop)) for crop in pipeline.test(images, crops)]).mean(dim=0)
            right[indices.to(world.device)] = correct(scores, labels).long()
            multiple = labels.ndim == 2
            if not multiple:
                pairs = labels * classes + scores.argmax(dim=1)
                confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    network.train(was_training)
    right, confusion = world.sum(right).cpu(), world.sum(confusion).cpu()
    return Evaluation(right.float().mean().item(), right.bool(), None if multiple else confusion)


def views(evaluation: Evaluation, data: ImageSet | MultiMNIST, novel: str) -> dict[str, float]:
    """Accuracy on familiar and on novel views, for networks that were trained on a third of them."""
    if novel == "none" or not isinstance(data, ImageSet):
        return {}
    familiar = familiar_views(data, novel)
    kinds = {"familiar": familiar, "novel": ~familiar}  # held-out training images are all familiar
    return {name: evaluation.right[chosen].float().mean().item() for name, chosen in kinds.items() if chosen.any()}


def autocast(device: torch.device, amp: str) -> AbstractContextManager:
    return nullcontext() if amp == "none" else torch.autocast(device.type, getattr(torch, amp))


def _batches(data: Dataset, world: World, workers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    own = torch.arange(world.rank, len(data), world.size)  # type: ignore[arg-type]
    order: Any = [batch.tolist() for batch in own.split(BATCH)]
    pinned = world.device.type == "cuda"
    loader = DataLoader(data, batch_sampler=order, collate_fn=as_it_is, num_workers=workers, pin_memory=pinned)
    for indices, (images, labels, *_) in zip(own.split(BATCH), loader, strict=True):
        yield indices, images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)


def as_it_is(batch: Any) -> Any:
    """Data sets give whole batches: there is nothing to collate."""
    return batch
