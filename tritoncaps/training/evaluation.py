"""Evaluation of a network on a data set: accuracy, confusion matrix, and accuracy by factors of variation."""

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
    """The result of an evaluation.

    Attributes:
        accuracy: fraction of images that are classified correctly.
        right: whether each image is classified correctly.
        confusion: number of images for each pair of true and predicted class; None if images have two classes.

    Shape:
        - right: bool [N], confusion: int64 [classes, classes]
    """

    accuracy: float
    right: Tensor
    confusion: Tensor | None

    def by(self, values: Tensor) -> dict[int, float]:
        """Accuracy for each value of a factor.

        Args:
            values: the value of the factor for each image.

        Shape:
            - values: [N]

        Returns:
            The accuracy by value.
        """
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
    """Evaluate a network on all images. Under torchrun, each process evaluates a part of them.

    Args:
        network: a network from images to scores or class capsules.
        data: the images and labels.
        pipeline: preprocessing of the images.
        world: the processes and the device of this process.
        crops: number of crops of each image, whose predictions are averaged.
        amp: mixed precision: "none", "bfloat16" or "float16".
        workers: number of processes that load images.

    Returns:
        The accuracy, and the result for each image.

    Example:
        >>> import torch
        >>> from tritoncaps.data import ImageSet, Pipeline
        >>> from tritoncaps.training import evaluate
        >>> from tritoncaps.training.distributed import world
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> images, labels = torch.randint(256, (10, 1, 8, 8), dtype=torch.uint8), torch.zeros(10, dtype=torch.int64)
        >>> with world("cpu") as one_process:
        ...     result = evaluate(network, ImageSet(images, labels, ("cat", "dog")), Pipeline(), one_process)
        >>> result.right.shape, int(result.confusion.sum())
        (torch.Size([10]), 10)
    """
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
    """The collate function: data sets return whole batches already."""
    return batch
