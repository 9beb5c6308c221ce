"""Table 1 of Hinton 2018: iterations, losses, coordinate addition, the kind of poses and of activations, and a CNN."""

from __future__ import annotations

from typing import NamedTuple

from tritoncaps.data import DATASETS
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import local, train_cnn, train_matrix_capsnet
from tritoncaps.experiments.style import bars, subplots
from tritoncaps.experiments.variants import FullMatrices, MixingProportions
from tritoncaps.routing import MixtureRouting
from tritoncaps.training import ConfigError


class Variant(NamedTuple):
    """A variant of the network. ``paper``: the error on smallNORB in the paper."""

    name: str
    paper: float | None
    routing: MixtureRouting
    coordinates: bool = True
    loss: str = "spread"


VECTORS = FullMatrices(3, competition="local")
VARIANTS = {
    "iterations-1": Variant("1 iteration", 0.097, local(1)),
    "iterations-2": Variant("2 iterations", 0.022, local(2)),
    "iterations-3": Variant("3 iterations", 0.018, local(3)),
    "iterations-5": Variant("5 iterations", 0.039, local(5)),
    "vectors": Variant("16-vectors, full matrices", 0.029, VECTORS),
    "no-coordinates": Variant("without coordinate addition", 0.026, local(3), coordinates=False),
    "vectors-no-coordinates": Variant("16-vectors, without coordinate addition", 0.032, VECTORS, coordinates=False),
    "margin": Variant("margin loss", 0.032, local(3), loss="margin"),
    "cross-entropy": Variant("cross-entropy", 0.058, local(3), loss="cross-entropy"),
    "mixing": Variant("mixing proportions as activations", None, MixingProportions(3, competition="local")),
}
CNN_ERROR = 0.052


def run(lab: Lab) -> None:
    if lab.options.run or lab.options.pretrained:
        raise ConfigError("ablation trains its own networks: do not use --run or --pretrained")
    count = lab.options.images or lab.choose(1000, 24_300)
    steps = lab.options.steps or lab.choose(80, 2000)
    data = lab.options.data or "toynorb"
    variants = _variants(lab)
    lab.plan(2 * len(variants) + 2)
    for key, variant in variants.items():
        options = {"routing": variant.routing, "coordinates": variant.coordinates}
        settings = {"data": data, "test_limit": min(count, 200), "loss": variant.loss, "options": options}
        trained = train_matrix_capsnet(lab, variant.name, steps, f"local-{key}", **settings)
        _add(lab, key, trained, count, variant.paper)
    cnn = train_cnn(lab, "CNN", steps, data=data, test_limit=min(count, 200))
    _add(lab, "cnn", cnn, count, CNN_ERROR)
    figure, ((axis,),) = subplots(1, 1, (7.6, 4.2))
    bars(
        axis,
        [row["variant"] for row in lab.rows],
        [row["error"] for row in lab.rows],
        [row["paper_error"] for row in lab.rows],
        "the paper, smallNORB",
    )
    axis.set(xlabel=f"test error on {data}, %", xlim=(0, 100), title=f"{steps} steps of training")
    lab.figure(
        "errors", figure, f"Error on test images of {data} after {steps} steps of {lab.rows[0]['batch']} images."
    )
    lab.numbers |= {
        "steps": steps,
        "images": lab.rows[0]["images"],
        "chance error": 1 - 1 / len(DATASETS[data].classes),
    }
    lab.note(
        "The third row is the standard network: 3 iterations, 4x4 matrices, spread loss and coordinate addition. The "
        "name of each other row says what differs. Only the types at one position compete for a child, not all its "
        "parents as in the paper, because that learns faster. The networks of the paper were trained much longer."
    )


def _variants(lab: Lab) -> dict[str, Variant]:
    """The variants. With --quick and without --steps, those that store their votes are omitted: they take ten times as
    long."""
    if not lab.options.quick or lab.options.steps is not None:
        return VARIANTS
    lab.note("The variants with 16-vectors are omitted, because they take minutes. Add --steps to include them.")
    return {key: variant for key, variant in VARIANTS.items() if not isinstance(variant.routing, FullMatrices)}


def _add(lab: Lab, key: str, trained: Trained, count: int, paper: float | None) -> None:
    data = trained.test_images(count, lab.options.seed)
    accuracy = lab.step(f"test-{key}", lambda: trained.evaluate(data).accuracy)
    lab.row(
        variant=trained.name,
        error=1 - accuracy,
        paper_error=paper,
        parameters=sum(parameter.numel() for parameter in trained.network.parameters()),
        steps=trained.result["step"],
        batch=trained.config.batch_size,
        images=len(data),
    )
