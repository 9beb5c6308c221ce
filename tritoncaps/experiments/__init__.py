"""The experiments of the papers, by name.

>>> from tritoncaps import experiments
>>> report = experiments.run("adversarial", quick=True)  # doctest: +SKIP
>>> report.numbers  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tritoncaps.experiments.lab import Lab, Options, Report, Trained, as_json
from tritoncaps.experiments.style import drawn_alike
from tritoncaps.training import ConfigError

__all__ = ["EXPERIMENTS", "Experiment", "Lab", "Options", "Report", "Trained", "as_json", "run"]


class Experiment(NamedTuple):
    """An experiment. Its function is ``run`` in the module with its name, with _ instead of -."""

    title: str
    paper: str

    def function(self, name: str) -> tuple[Callable[[Lab], None], str]:
        """The function, and the source of its module, because results depend on it."""
        module = import_module(f"tritoncaps.experiments.{name.replace('-', '_')}")
        return module.run, Path(module.__file__ or "").read_text()


EXPERIMENTS: dict[str, Experiment] = {
    "ablation": Experiment("Ablation of a capsule network", "Hinton 2018, table 1"),
    "novel-viewpoints": Experiment("Accuracy on novel viewpoints", "Hinton 2018, table 2"),
    "adversarial": Experiment("Adversarial attacks on capsules and a CNN", "Hinton 2018, figure 3"),
    "vote-histograms": Experiment("Distances of votes in each iteration", "Hinton 2018, figure 2 and B.2"),
    "dimensions": Experiment("The dimensions of a capsule", "Sabour 2017, figure 4"),
    "reconstructions": Experiment("Reconstructed images", "Sabour 2017, figure 3"),
    "segmentation": Experiment("Segmentation of two overlapping digits", "Sabour 2017, figure 5"),
    "affine": Experiment("Digits under affine transformations", "Sabour 2017, section 5.2"),
    "convergence": Experiment("Convergence of routing", "Sabour 2017, figure A.1"),
    "routing-matters": Experiment("The effect of routing", "Paik 2019; Gu and Tresp 2019"),
}


def run(name: str, out: str | Path | None = None, *, quiet: bool = False, **options: Any) -> Report:
    """Run or continue an experiment in the folder ``out``, by default runs/experiments/NAME.

    ``options`` are the fields of :class:`Options`. Trained networks are in the folder ``trainings`` beside ``out``, and
    other experiments use them too.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}: it must be one of {', '.join(EXPERIMENTS)}")
    function, source = EXPERIMENTS[name].function(name)
    folder = Path("runs", "experiments", name) if out is None else Path(out)
    lab = Lab(name, EXPERIMENTS[name].title, folder, Options(**options), source, quiet, EXPERIMENTS[name].paper)
    try:
        with drawn_alike():
            function(lab)
        return lab.report()
    finally:
        lab.close()
