"""What all algorithms share: tables, numerics, backends, operator registration, CPU and Triton tools."""
