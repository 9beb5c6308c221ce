"""The context manager of every launch."""

from __future__ import annotations

import torch

from tritoncaps.kernels.common.triton import announcing


class surroundings(torch.cuda.device_of):  # noqa: N801, a function to its callers
    """Inside, the current GPU, which runs the launches, is the GPU of a tensor. No effect on a CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        announcing.install()
        super().__init__(tensor)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        announcing.finish()
        if isinstance(error, RuntimeError) and "C compiler" in str(error):
            raise RuntimeError(
                "backend 'triton' needs a C compiler for the launchers of its kernels, but there is none: install gcc "
                "or clang, or name one in the environment variable CC"
            ) from error
