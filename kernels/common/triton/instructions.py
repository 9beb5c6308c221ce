"""Instructions of a compiled kernel's loops, read from NVIDIA's machine code."""

from __future__ import annotations

import re
from typing import NamedTuple

LABEL = re.compile(r"\s*(\.L\w+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


class Loop(NamedTuple):
    """A loop: the indices of its first and its last instruction."""

    first: int
    last: int

    def holds(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def nest(assembly: str) -> list[int]:
    """Count instructions in the output of `nvdisasm`: of the largest loop, of the largest loop inside it, and so on.

    The count of a loop does not include the loops inside it.
    """
    operations: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(operations)
        elif found := INSTRUCTION.search(line):
            operations.append((found[1], found[2]))
    ends: dict[int, int] = {}  # the last instruction of each loop, by its first instruction
    for i, (operation, operands) in enumerate(operations):
        target = re.search(r"\.L\w+", operands) if operation.startswith("BRA") else None
        if target and labels.get(target[0], i) < i:  # a jump to itself ends the code
            ends[labels[target[0]]] = i
    loops = [Loop(*span) for span in ends.items()]
    sizes = []
    inside = loops
    while inside:
        loop = max(inside, key=lambda x: x.size)
        inside = [x for x in loops if loop.holds(x)]
        outermost = [x for x in inside if not any(y.holds(x) for y in inside)]
        sizes.append(loop.size - sum(x.size for x in outermost))
    return sizes
