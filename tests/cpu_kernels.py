"""Compile all CPU kernels for one dtype, or load them from the cache: python tests/cpu_kernels.py float32"""

import sys

import torch

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, RoutingMap, VBRouting, VectorCaps, functional


def capsules(dtype, *shape):
    poses, activations = torch.randn(*shape, 4, 4, dtype=dtype), torch.rand(shape, dtype=dtype)
    return Capsules(poses.requires_grad_(), activations.requires_grad_())


def step(*results):
    sum(x.sum() for x in results).backward()


def prepare(dtype):
    step(*ConvCaps2d(2, 2, 2, dtype=dtype)(capsules(dtype, 1, 2, 2, 2)))
    step(*ClassCaps(2, 2, routing=VBRouting(), dtype=dtype)(capsules(dtype, 1, 2, 2)))
    step(*VectorCaps(3, 4, 2, 5, dtype=dtype)(torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)))
    step(functional.squash(torch.randn(3, 8, dtype=dtype, requires_grad=True)))
    routing_map = RoutingMap.full((2,))
    poses, activations = capsules(dtype, 1, 2, 2)
    votes = functional.pose_votes(poses, torch.randn(1, 2, 2, 4, 4, dtype=dtype, requires_grad=True), routing_map)
    betas = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    shares = torch.rand(votes.shape[:5], dtype=dtype, requires_grad=True)
    gaussians = functional.m_step(votes, shares, activations, *betas, routing_map, inverse_temperature=1.0)
    step(functional.e_step(votes, gaussians, routing_map))


if __name__ == "__main__":
    prepare(getattr(torch, sys.argv[1]))
