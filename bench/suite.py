"""All benchmarks in one run.

python bench/suite.py --quick                        under two minutes on two cores
python bench/suite.py                                larger sizes, more rounds, everything compiled
python bench/suite.py --only em_routing layers       some subjects
python bench/suite.py --compare A.json B.json        compare two runs case by case
python bench/suite.py --quick --against HEAD~3       this version and another one, measured in turns
"""

from __future__ import annotations

import call_cost
import coordinate_addition
import dynamic_routing
import e_step
import em_routing
import first_call
import layers
import m_step
import memory
import pose_votes
import scaling
from command import main

import models

MODULES = (
    pose_votes, coordinate_addition, m_step, e_step, em_routing, dynamic_routing, layers, models, scaling, memory,
    first_call, call_cost,
)  # fmt: skip
SUBJECTS = {module.__name__: module.cases for module in MODULES}

if __name__ == "__main__":
    main(SUBJECTS, __doc__)
