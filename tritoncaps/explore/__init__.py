"""A page that shows the capsules of a network: one HTML file without external resources.

>>> from tritoncaps import explore
>>> explore.write_page("network.html", network, pixels, labels, classes, pipeline)  # doctest: +SKIP
"""

from tritoncaps.explore.collect import EPSILONS, Collected, collect
from tritoncaps.explore.page import LIMIT, render, write_page

__all__ = ["EPSILONS", "LIMIT", "Collected", "collect", "render", "write_page"]
