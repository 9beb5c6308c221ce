"""Mixture routings (EM and all that fit a Gaussian to a parent's votes): iteration, operators, kernels."""
