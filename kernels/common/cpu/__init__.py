"""Code for all CPU kernels: SIMD vectors, loops, tasks, threads, signals, compilation, memory."""
