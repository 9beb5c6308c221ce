"""Code for all algorithms: tables, numerics, backends, operator registration, CPU and Triton tools."""
