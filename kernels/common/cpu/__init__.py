"""What all CPU kernels share: SIMD vectors, loops, tasks, threads, signals, compilation, memory."""
