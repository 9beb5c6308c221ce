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
# # Looking inside a trained network
#
# `MatrixCapsNet.small` with the pretrained weights of the package, on toys of ToyNORB. No download is needed.

# %%
import matplotlib.pyplot as plt
import torch

from tritoncaps.data import DATASETS, toynorb
from tritoncaps.models import MatrixCapsNet

network = MatrixCapsNet.small(2, 5, pretrained="toynorb").eval()
views = torch.from_numpy(toynorb.render_toy(seed=0, category=2, instance=0)[::200])  # an airplane, bytes [5, 2, 48, 48]
(images,) = DATASETS["toynorb"].pipeline.test(views)  # standardised, and the middle 32x32 pixels
with torch.no_grad():
    layers = network(images, return_intermediate=True)
for name, capsules in layers.items():
    print(f"{name:10}  poses {list(capsules.poses.shape)}  mean activation {capsules.activations.mean():.2f}")

# %% [markdown]
# The predicted class of each view; the pictures show the left image of the stereo pair.

# %%
classes = DATASETS["toynorb"].classes
figure, axes = plt.subplots(1, len(images), figsize=(7, 1.7), dpi=60)
for axis, image, activations in zip(axes, images, layers["class_caps"].activations, strict=True):
    axis.imshow(image[0].numpy(), cmap="gray")
    axis.set_title(classes[activations.argmax()], fontsize=9)
    axis.axis("off")

# %% [markdown]
# `assignments` of a layer returns the assignments R of its last iteration, [images, parent positions, slots, child
# types, parent types]. The picture shows the assignments of all children of the last layer to the classes.

# %%
R = network.class_caps.assignments(layers["conv_caps2"])
print(list(R.shape))
shares = R[0, 0].mean(0)  # over the 4x4 positions: [child types, classes]
figure, axis = plt.subplots(figsize=(4, 2.2), dpi=60)
axis.imshow(shares.T.numpy(), vmin=0, vmax=1, cmap="viridis")
axis.set_xticks(range(0, 16, 5))
axis.set_xlabel("child type")
axis.set_yticks(range(len(classes)), classes)
figure.tight_layout()

# %% [markdown]
# The assignments of each child sum to one over the classes that compete for it.

# %%
print(torch.allclose(R.sum(-1), torch.ones(R.shape[:-1]), atol=1e-5))
