"""The kernels: `em_routing`, the iteration over three views, and the backends that provide them."""
