# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first capsule network
#
# The images show coloured discs, vertical bars and horizontal bars at random positions. A small network of convolutions
# and capsules learns to classify them in a few training steps, on a CPU.

# %%
import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

from tritoncaps import ClassCaps, ConvCaps2d, EMRouting, LinearMargin, PrimaryCaps, SpreadLoss

sys.path.insert(0, "..")
import toy_data

images, labels = toy_data.images(1000)
figure, axes = plt.subplots(1, 6, figsize=(6, 1.2), dpi=60)
for axis, image in zip(axes, images, strict=False):
    axis.imshow((image.permute(1, 2, 0) / 6 + 0.4).clip(0, 1).numpy())
    axis.axis("off")

# %% [markdown]
# The layers work in `nn.Sequential`. `PrimaryCaps` computes the first capsules from features, `ConvCaps2d` routes the
# votes of 3x3 windows, and `ClassCaps` returns one capsule for each class.

# %%
torch.manual_seed(0)
routing = EMRouting(iterations=2, competition="local")
model = nn.Sequential(
    nn.Conv2d(3, 16, kernel_size=5, stride=4),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    PrimaryCaps(16, 8),
    ConvCaps2d(8, 8, kernel_size=3, stride=2, routing=routing),
    ClassCaps(8, 3, routing=routing),
)
poses, activations = model(images[:2])
print(poses.shape, activations.shape)

# %% [markdown]
# The spread loss raises the activation of the true class above those of all other classes, by a margin that grows with
# each step.

# %%
steps = 60
loss, optimiser = SpreadLoss(LinearMargin(steps)), torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(steps):
    chosen = torch.randint(len(images), (32,))
    loss.set_step(step)
    optimiser.zero_grad()
    value = loss(model(images[chosen]), labels[chosen])
    value.backward()
    optimiser.step()

new_images, new_labels = toy_data.images(300, seed=1)
with torch.no_grad():
    found = model.eval()(new_images)
print(f"{(found.activations.argmax(1) == new_labels).float().mean():.1%} of new images right")

# %% [markdown]
# The next notebook, `looking_inside`, shows how the capsules are routed.
