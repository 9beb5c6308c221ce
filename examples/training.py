"""The training loop of the examples: the same as for any network of torch.nn."""

import torch

from tritoncaps import LinearMargin, SpreadLoss


def fit(model, inputs, labels, steps, batch=32, lr=5e-3):
    """Train ``model``, which returns class capsules, with the spread loss. Return the last loss."""
    loss, optimiser = SpreadLoss(LinearMargin(steps)), torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(inputs), (batch,))
        loss.set_step(step)
        optimiser.zero_grad()
        value = loss(model(inputs[chosen]), labels[chosen])
        value.backward()
        optimiser.step()
    return value.item()


@torch.no_grad()
def accuracy(model, inputs, labels):
    """The fraction of inputs whose most active class capsule is the true class."""
    model.eval()
    return (model(inputs).activations.argmax(1) == labels).float().mean().item()
