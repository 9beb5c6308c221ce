"""What all Triton kernels share: launch options, pairs of locations, what the compiler makes of each kernel."""
