"""The kernels: a folder for each algorithm, and `common` for what they share."""
