"""A graph: the joints of a stick figure are children, its limbs are their parents, and its gesture is the class.

The pose of a joint is its position, as a homogeneous 4x4 matrix. Edges of one relation share their matrices: here both
arms use the same relations.

python examples/graph.py
"""

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import Capsules, ClassCaps, EMRouting, GraphCaps, RoutingMap

# relation: 0 neck, 1 elbow, 2 hand, 3 hip, 4 head
LEFT, RIGHT, BODY = range(3)
EDGES = [(1, LEFT, 0), (3, LEFT, 1), (4, LEFT, 2), (1, RIGHT, 0), (5, RIGHT, 1), (6, RIGHT, 2)]
EDGES += [(0, BODY, 3), (1, BODY, 0), (2, BODY, 4)]


class Figure(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        joints, limbs, relations = zip(*EDGES, strict=True)
        self.skeleton = RoutingMap.from_edges(joints, limbs, num_children=7, num_parents=3, relations=relations)
        routing = EMRouting(iterations=2, competition="local")
        self.limbs = GraphCaps(1, 8, num_relations=5, routing=routing)
        self.gesture = ClassCaps(8, num_classes, routing=routing)

    def forward(self, joints):
        poses = torch.eye(4).repeat(len(joints), 1, 7, 1, 1)  # [N, 1 type, 7 joints, 4, 4]
        poses[:, 0, :, :2, 3] = joints
        return self.gesture(self.limbs(Capsules(poses, torch.ones(poses.shape[:3])), self.skeleton))


def main(steps=100):
    torch.manual_seed(0)
    model = Figure(num_classes=3)
    fit(model, *toy_data.figures(1000), steps, lr=2e-2)
    found = accuracy(model, *toy_data.figures(300, seed=1))
    print(f"accuracy on new figures: {found:.1%}")
    return found


if __name__ == "__main__":
    main()
