"""The context of every launch."""

import torch

# A launch goes to the current GPU: make it that of a tensor. Nothing happens on a CPU.
surroundings = torch.cuda.device_of
