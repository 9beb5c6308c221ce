"""Mixture routings (EM, and all others that fit a Gaussian to the votes of a parent): iteration, operators, kernels."""
