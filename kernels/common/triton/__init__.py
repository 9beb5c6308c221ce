"""Code for all Triton kernels: launch options, pairs of locations, compilation and its resource budgets."""
