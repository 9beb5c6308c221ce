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
# `MatrixCapsNet.small` with the weights that come with the package, on toys of ToyNORB. Nothing is downloaded.

# %%
import matplotlib.pyplot as plt
import torch

from tritoncaps.models import MatrixCapsNet

torch.manual_seed(0)
network = MatrixCapsNet.small(2, 5, pretrained="toynorb").eval()
images = torch.randn(2, 2, 32, 32)  # images of mean 0 and variance 1; noise is enough to look at shapes
with torch.no_grad():
    layers = network(images, return_intermediate=True)
for name, capsules in layers.items():
    print(f"{name:10}  poses {list(capsules.poses.shape)}  mean activation {capsules.activations.mean():.2f}")

# %% [markdown]
# `assignments` of a layer are the shares R of its last iteration, [images, parent positions, slots, child types, parent
# types]. Here are the shares of the classes in all children of the last layer.

# %%
R = network.class_caps.assignments(layers["conv_caps2"])
print(list(R.shape))
shares = R[0, 0].mean(0)  # over the 4x4 positions: [child types, classes]
figure, axis = plt.subplots(figsize=(4, 2.2), dpi=60)
axis.imshow(shares.T, vmin=0, vmax=1, cmap="viridis")
axis.set_xlabel("child type")
axis.set_ylabel("class")
figure.tight_layout()

# %% [markdown]
# The shares of each child sum to one over the classes that compete for it.

# %%
print(torch.allclose(R.sum(-1), torch.ones(R.shape[:-1]), atol=1e-5))
