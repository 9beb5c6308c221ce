"""Dynamic routing of vector capsules: operators and kernels."""
