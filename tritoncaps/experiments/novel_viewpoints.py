"""Table 2 of Hinton 2018: train on a third of the views, test on the others.

Capsules and a CNN have the same accuracy on held-out images of the familiar views: if necessary, training stops there.
So the comparison shows only the difference on novel views.
"""

from __future__ import annotations

import math
from typing import Any

from tritoncaps.data import ImageSet, familiar_views
from tritoncaps.data.images import degrees
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import local, train_cnn, train_matrix_capsnet
from tritoncaps.experiments.style import CAPSULES, CNN
from tritoncaps.training import Config, ConfigError
from tritoncaps.training.pictures import pyplot

# test error on familiar and on novel views of smallNORB: capsules, CNN
PAPER = {"azimuth": (0.037, 0.135, 0.037, 0.200), "elevation": (0.043, 0.123, 0.043, 0.178)}
EVALUATIONS = 15  # evaluations of a quick training, to stop it in time
CNN_STEPS = 4  # a quick CNN may take this many times the steps of the capsules to reach their accuracy
# A full training is that of docs/recipes/smallnorb-novel-views-capsules.toml and smallnorb-novel-views-cnn.toml.
FULL: dict[str, Any] = {
    "standardise": "image",
    "jitter": "last",
    "rotation": 10.0,
    "scaling": 0.1,
    "mixup": 0.2,
    "batch_size": 32,
    "lr_schedule": "tail",
    "lr_tail": 0.5,
    "ema": 0.999,
    "validation": 1000,
    "final_test": False,
    "evaluate_every": 890,
}
FULL_STEPS = 17_680
FULL_CNN: dict[str, Any] = {**FULL, "model": "cnn-smallnorb", "lr": 1e-3}
FULL_CAPSULES: dict[str, Any] = {
    **FULL,
    "model": "matrix-capsnet-small",
    "iterations": 2,
    "competition": "local",
    "capsule_dropout": 0.25,
    "margin": "linear",
    "margin_steps": 8000,
    "lr": 3e-3,
}


def run(lab: Lab) -> None:
    if lab.options.run or lab.options.pretrained:
        raise ConfigError("novel-viewpoints trains its own networks: do not use --run or --pretrained")
    data = lab.options.data or "toynorb"
    lab.plan(8)
    found = {factor: _of_factor(lab, data, factor) for factor in PAPER}
    for factor, networks in found.items():
        for name, numbers in networks.items():
            familiar, novel = PAPER[factor][:2] if name == "capsules" else PAPER[factor][2:]
            lab.row(
                views=factor,
                network=name,
                held_out_error=1 - numbers["held_out"],
                familiar_error=1 - numbers["familiar"],
                novel_error=1 - numbers["novel"],
                paper_familiar_error=familiar,
                paper_novel_error=novel,
                steps=numbers["steps"],
            )
    lab.numbers["images"] = next(iter(found["azimuth"].values()))["images"]
    lab.figure(
        "views",
        _figure(found),
        "Accuracy on test images for each angle of view. The shaded views are those of the training. Both networks "
        "have the same accuracy on held-out images of these views.",
    )
    lab.note(
        f"The test images of {data} show other objects than the training images. The numbers of the paper are for "
        "smallNORB, with both networks stopped at the same accuracy on familiar views of the test set."
    )


def _of_factor(lab: Lab, data: str, factor: str) -> dict[str, dict[str, Any]]:
    train = _train_quickly if lab.options.quick else _train_fully
    capsules = train(lab, "capsules", data, factor)
    # the rate of a full training decays at its end, so the CNN stops before only if its last accuracy is higher
    cnn = None if lab.options.quick else train(lab, "CNN", data, factor)
    if cnn is None or cnn.result["accuracy"] > capsules.result["accuracy"]:
        cnn = train(lab, "CNN", data, factor, stop_at=capsules.result["accuracy"])
    if cnn.result["accuracy"] < capsules.result["accuracy"]:
        capsules = train(lab, "capsules", data, factor, stop_at=cnn.result["accuracy"])
    count = lab.options.images or lab.choose(900, 24_300)
    test = capsules.test_images(count, lab.options.seed)
    return {
        network.name: lab.step(f"{factor}-{network.name}", lambda network=network: _test(network, test, factor))  # type: ignore[misc]
        for network in (capsules, cnn)
    }


def _train_quickly(lab: Lab, name: str, data: str, factor: str, stop_at: float = 0.0) -> Trained:
    steps = lab.options.steps or 300
    shared: dict[str, Any] = {
        "data": data,
        "novel": factor,
        "validation": 500,
        "ema": 0.95,  # smoother accuracies from one evaluation to the next
        "final_test": False,
        "lr_schedule": "exponential",  # a cosine would favour networks that train to the end
        "stop_at": stop_at,
    }
    if name == "CNN":  # it learns faster
        return train_cnn(lab, name, CNN_STEPS * steps, evaluate_every=max(steps // (4 * EVALUATIONS), 1), **shared)
    shared |= {"lr": 3e-3, "options": {"routing": local(2)}, "evaluate_every": max(steps // EVALUATIONS, 1)}
    return train_matrix_capsnet(lab, name, steps, "local-2", **shared)


def _train_fully(lab: Lab, name: str, data: str, factor: str, stop_at: float = 0.0) -> Trained:
    settings = FULL_CNN if name == "CNN" else FULL_CAPSULES
    steps, seed = lab.options.steps or FULL_STEPS, lab.options.seed
    return lab.train(name, Config(**settings, data=data, novel=factor, steps=steps, seed=seed, stop_at=stop_at))


def _test(network: Trained, test: ImageSet, factor: str) -> dict[str, Any]:
    result, familiar = network.evaluate(test), familiar_views(test, factor)
    return {
        "held_out": network.result["accuracy"],
        "familiar": result.right[familiar].float().mean().item(),
        "novel": result.right[~familiar].float().mean().item(),
        "by": {str(value): accuracy for value, accuracy in result.by(test.factors[factor]).items()},
        "steps": network.result["step"],
        "images": len(test),
    }


def _figure(found: dict[str, dict[str, dict[str, Any]]]) -> Any:
    plt = pyplot()
    figure = plt.figure(figsize=(9.6, 4.4), layout="constrained")
    polar, flat = figure.add_subplot(1, 2, 1, projection="polar"), figure.add_subplot(1, 2, 2)
    colours = {"capsules": CAPSULES, "CNN": CNN}
    for name, numbers in found["azimuth"].items():
        angles = [math.radians(10 * int(value)) for value in numbers["by"]]
        values = [100 * accuracy for accuracy in numbers["by"].values()]
        polar.plot([*angles, angles[0]], [*values, values[0]], color=colours[name], marker="o", label=name)
    polar.axvspan(math.radians(-70), math.radians(50), color="#2e8b57", alpha=0.12, linewidth=0)
    polar.set(ylim=(0, 100), theta_zero_location="N")
    polar.set_yticks([25, 50, 75, 100], ["25%", "50%", "75%", "100%"], fontsize=7.5, color="#667085")
    polar.set_rlabel_position(10)
    polar.set_title("Accuracy by azimuth", loc="center", pad=10)
    for name, numbers in found["elevation"].items():
        angles = [int(degrees("elevation", int(value)).rstrip("°")) for value in numbers["by"]]
        values = [100 * accuracy for accuracy in numbers["by"].values()]
        flat.plot(angles, values, color=colours[name], marker="o", label=name)
    flat.axvspan(27.5, 42.5, color="#2e8b57", alpha=0.12, linewidth=0, label="views of the training")
    flat.set(xlabel="elevation, degrees", ylabel="accuracy, %", ylim=(0, 100), title="Accuracy by elevation")
    figure.legend(*flat.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
