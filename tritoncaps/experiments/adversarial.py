"""Figure 3 of Hinton 2018: accuracy of capsules and a CNN on adversarial images.

White box: the attack uses the gradients of the attacked network. Black box: it uses the gradients of a CNN, and the
images are given to the capsules and to a second CNN. Epsilon is in units of pixels in [0, 1], before standardisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritoncaps import attacks
from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained, pixels_of
from tritoncaps.experiments.networks import train_cnn, train_matrix_capsnet
from tritoncaps.experiments.style import CAPSULES, CNN, OTHER, picture, row_label, subplots
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training.objective import class_scores

EXAMPLES = 2  # images in the figure
METHODS: dict[str, Callable[..., Tensor]] = {"FGSM": attacks.fgsm, "BIM": attacks.bim}


def run(lab: Lab) -> None:
    epsilons = lab.choose([0.0, 0.01, 0.02, 0.05, 0.1], [0.0, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4])
    count = lab.options.images or lab.choose(40, 2000)
    bim_steps = lab.choose(5, 10)
    lab.plan(7)
    capsules = _capsules(lab, count)
    steps, settings = lab.options.steps or lab.choose(400, 5000), {"data": capsules.config.data, "test_limit": count}
    cnn = train_cnn(lab, "CNN", steps, **settings)
    other = train_cnn(lab, "another CNN", steps, seed=lab.options.seed + 1, **settings)
    data = capsules.test_images(count, lab.options.seed)

    attacked = {
        network.name: lab.step(name, lambda n=network: _white_box(n, data, epsilons, bim_steps))  # type: ignore[misc]
        for name, network in (("capsules", capsules), ("cnn", cnn))
    }
    black_box = lab.step("black-box", lambda: _black_box(cnn, (capsules, other), data, epsilons, bim_steps))
    examples = lab.step("examples", lambda: _examples((capsules, cnn), data, epsilons, bim_steps))

    for name, found in attacked.items():
        for method in METHODS:
            for i, epsilon in enumerate(epsilons):
                values = {"accuracy": found[method][i], "targeted_success": found[f"{method} targeted"][i]}
                lab.row(attack=method, box="white", network=name, epsilon=epsilon, **values)
    for name, by_method in black_box.items():
        for method, accuracies in by_method.items():
            for epsilon, accuracy in zip(epsilons, accuracies, strict=True):
                lab.row(attack=method, box="black", network=name, epsilon=epsilon, accuracy=accuracy)
    for name, found in attacked.items():
        lab.numbers[f"share of zero gradients, {name}"] = found["zeros"]
        lab.numbers[f"mean gradient, {name}"] = found["mean"]
    lab.numbers |= {"images": len(data), "epsilons": epsilons}
    lab.figure(
        "accuracy",
        _curves(attacked, black_box, epsilons),
        f"Accuracy over epsilon (white box), success of targeted attacks, and accuracy on images that attack another "
        f"CNN (black box), for {len(data)} test images of {capsules.config.data}. Figure 3 of the paper has the first "
        "two. The paper finds that capsules are far less vulnerable in the white box and similar in the black box.",
    )
    lab.figure(
        "examples",
        _example_figure(examples, data, epsilons),
        "Images of the basic iterative method with their epsilon and the prediction of the attacked network (green: "
        "correct). Untargeted attacks, white box; of stereo pairs, only the left image.",
    )
    lab.note(
        "A network can seem robust because its gradients vanish. As in the paper, the report therefore contains the "
        "fraction of zero gradients and the mean absolute gradient of the loss with respect to the pixels."
    )


def _capsules(lab: Lab, count: int) -> Trained:
    given = lab.given()
    if given is not None:
        return given
    data = lab.options.data or "toynorb"
    if lab.options.quick and data in CHECKSUMS:
        shipped = lab.shipped(data)._replace(name="capsules")
        accuracy = shipped.result["card"]["test_accuracy"]
        lab.note(f"The capsules are the pretrained weights {data!r}: accuracy {accuracy:.1%} on all test images.")
        return shipped
    steps = lab.options.steps or lab.choose(150, 5000)
    return train_matrix_capsnet(lab, "capsules", steps, data=data, test_limit=count)


def _white_box(network: Trained, data: ImageSet, epsilons: list[float], steps: int) -> dict[str, Any]:
    """Accuracy under attacks of all methods, success of targeted attacks, and the size of the gradients."""
    pixels, labels = pixels_of(data), data.labels
    found: dict[str, Any] = {}
    for method in METHODS:
        changed = [_attack(method, network, pixels, labels, epsilon, steps) for epsilon in epsilons]
        found[method] = [_share(network, images, labels) for images in changed]
        found[f"{method} targeted"] = [_targeted_success(method, network, data, epsilon, steps) for epsilon in epsilons]
    gradients = attacks.gradient(lambda middle: network(network.pasted(middle, pixels)), network.seen(pixels), labels)
    return {**found, **attacks.gradient_size(gradients)._asdict()}


def _targeted_success(method: str, network: Trained, data: ImageSet, epsilon: float, steps: int) -> float:
    """The fraction of images that are classified as the target, averaged over targets. Each target is tried with all
    images of the other classes."""
    shares = []
    for target in range(len(data.classes)):
        others = data.select(data.labels != target)
        wanted = torch.full_like(others.labels, target)
        images = _attack(method, network, pixels_of(others), wanted, epsilon, steps, targeted=True)
        shares.append(_share(network, images, wanted))
    return sum(shares) / len(shares)


def _black_box(
    source: Trained, networks: tuple[Trained, ...], data: ImageSet, epsilons: list[float], steps: int
) -> dict[str, dict[str, list[float]]]:
    """Accuracy of ``networks`` on adversarial images from the gradients of ``source``."""
    changed = {
        method: [_attack(method, source, pixels_of(data), data.labels, epsilon, steps) for epsilon in epsilons]
        for method in METHODS
    }
    return {
        network.name: {
            method: [_share(network, images, data.labels) for images in by_epsilon]
            for method, by_epsilon in changed.items()
        }
        for network in networks
    }


def _attack(
    method: str, network: Trained, pixels: Tensor, labels: Tensor, epsilon: float, steps: int, targeted: bool = False
) -> Tensor:
    """Change only the crop that is the input of the network. Other pixels would change the mean and the variance."""
    if epsilon == 0:
        return pixels
    options = {"steps": steps} if method == "BIM" else {}

    def classify(middle: Tensor) -> Any:
        return network(network.pasted(middle, pixels))

    middle = METHODS[method](classify, network.seen(pixels), labels, epsilon, targeted=targeted, **options)
    return network.pasted(middle, pixels)


@torch.no_grad()
def _share(network: Trained, pixels: Tensor, labels: Tensor) -> float:
    """The fraction of images that are classified as ``labels``."""
    return (class_scores(network(pixels)).argmax(dim=1) == labels).float().mean().item()


def _examples(networks: tuple[Trained, ...], data: ImageSet, epsilons: list[float], steps: int) -> list[dict[str, Any]]:
    """Rows of changed images with their predictions. Both networks classify the unchanged images correctly."""
    pixels = pixels_of(data)
    with torch.no_grad():
        known = torch.stack([class_scores(n(pixels)).argmax(1) == data.labels for n in networks]).all(0).nonzero()[:, 0]
    known = known[: 4 * EXAMPLES : 4] if len(known) >= 4 * EXAMPLES else known[:EXAMPLES]
    rows = []
    for index in known.tolist():
        image, label = pixels[index : index + 1], data.labels[index : index + 1]
        for network in networks:
            changed = torch.cat([_attack("BIM", network, image, label, e, steps) for e in epsilons])
            with torch.no_grad():
                taken_for = class_scores(network(changed)).argmax(1)
            rows.append(
                {
                    "network": network.name,
                    "images": network.seen(changed),
                    "taken_for": taken_for.tolist(),
                    "index": index,
                }
            )
    return rows


def _curves(attacked: dict[str, Any], black_box: dict[str, Any], epsilons: list[float]) -> Any:
    figure, ((accuracy, success, transfer),) = subplots(1, 3, (11.5, 3.5), sharey=True)
    styles = {"FGSM": {"linestyle": "--", "marker": "o"}, "BIM": {"linestyle": "-", "marker": "s"}}
    for colour, (name, found) in zip((CAPSULES, CNN), attacked.items(), strict=True):
        for method, style in styles.items():
            accuracy.plot(epsilons, _percent(found[method]), color=colour, label=f"{name}, {method}", **style)
            success.plot(epsilons, _percent(found[f"{method} targeted"]), color=colour, **style)
    for colour, (name, found) in zip((CAPSULES, OTHER), black_box.items(), strict=True):
        for method, style in styles.items():
            transfer.plot(epsilons, _percent(found[method]), color=colour, label=f"{name}, {method}", **style)
    accuracy.set(title="White box", xlabel="epsilon", ylabel="accuracy or success, %", ylim=(-2, 102))
    success.set(title="Success of targeted attacks", xlabel="epsilon")
    transfer.set(title="Black box, from a CNN", xlabel="epsilon")
    accuracy.legend()
    transfer.legend()
    return figure


def _example_figure(rows: list[dict[str, Any]], data: ImageSet, epsilons: list[float]) -> Any:
    count = max(len(rows), 1)
    figure, axes = subplots(count, len(epsilons), (1.6 + 1.05 * len(epsilons), 1.25 * count + 0.3))
    for line, row in zip(axes, rows, strict=False):
        for axis, image, taken_for in zip(line, row["images"], row["taken_for"], strict=True):
            picture(axis, image, data.classes[taken_for], right=taken_for == int(data.labels[row["index"]]))
        row_label(line[0], row["network"])
    for axis, epsilon in zip(axes[-1], epsilons, strict=True):
        axis.set_xlabel(f"epsilon {epsilon:g}", fontsize=8)
    return figure


def _percent(values: list[float]) -> list[float]:
    return [100 * value for value in values]
