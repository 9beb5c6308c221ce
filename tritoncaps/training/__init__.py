"""Training and evaluation: a plain PyTorch loop with the losses and schedules of the papers."""
