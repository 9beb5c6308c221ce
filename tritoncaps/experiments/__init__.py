"""The experiments of the papers, each by its name.

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
    """``title`` says what it shows; the function is ``run`` of the module with its name, with _ for -."""

    title: str
    paper: str

    def function(self, name: str) -> tuple[Callable[[Lab], None], str]:
        """The function, and the source of its module, which results depend on."""
        module = import_module(f"tritoncaps.experiments.{name.replace('-', '_')}")
        return module.run, Path(module.__file__ or "").read_text()


EXPERIMENTS: dict[str, Experiment] = {
    "ablation": Experiment("What a capsule network owes to its parts", "Hinton 2018, table 1"),
    "novel-viewpoints": Experiment("Views that training did not show", "Hinton 2018, table 2"),
    "adversarial": Experiment("Adversarial images against capsules and a CNN", "Hinton 2018, figure 3"),
    "vote-histograms": Experiment("How votes come together", "Hinton 2018, figure 2 and B.2"),
    "dimensions": Experiment("What the dimensions of a capsule mean", "Sabour 2017, figure 4"),
    "reconstructions": Experiment("What a capsule network draws of what it saw", "Sabour 2017, figure 3"),
    "segmentation": Experiment("Two digits, one on top of the other", "Sabour 2017, figure 5"),
    "affine": Experiment("Digits under affine transformations", "Sabour 2017, section 5.2"),
    "convergence": Experiment("How fast routing converges", "Sabour 2017, figure A.1"),
    "routing-matters": Experiment("What routing is worth", "Paik 2019; Gu and Tresp 2019"),
}


def run(name: str, out: str | Path | None = None, *, quiet: bool = False, **options: Any) -> Report:
    """Run an experiment, or go on with it, in the folder ``out``, by default runs/experiments/NAME.

    ``options``: those of :class:`Options`. Trainings go into the folder ``trainings`` beside ``out``, where other
    experiments find them.
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
