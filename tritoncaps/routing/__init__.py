"""The routings, which are values of a layer's argument ``routing``, and base classes for your own routing.

base.py      Routing: the protocol between layers and routings; MatrixRouting and VectorRouting are its two kinds
mixture.py   MixtureRouting: base class of routings that fit a Gaussian to the votes for a parent; write only `fit`
em.py        EMRouting
tempered.py  TemperedEMRouting
vb.py        VBRouting
dynamic.py   DynamicRouting
attention.py SelfAttentionRouting
"""

from tritoncaps.routing.attention import SelfAttentionRouting
from tritoncaps.routing.base import LayerSizes, MatrixRouting, NewParameter, Routing, VectorRouting
from tritoncaps.routing.dynamic import DynamicRouting
from tritoncaps.routing.em import EMRouting
from tritoncaps.routing.mixture import Components, MixtureRouting, Moments
from tritoncaps.routing.tempered import TemperedEMRouting
from tritoncaps.routing.vb import VBRouting

__all__ = [
    "Components",
    "DynamicRouting",
    "EMRouting",
    "LayerSizes",
    "MatrixRouting",
    "MixtureRouting",
    "Moments",
    "NewParameter",
    "Routing",
    "SelfAttentionRouting",
    "TemperedEMRouting",
    "VBRouting",
    "VectorRouting",
]
