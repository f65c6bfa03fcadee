"""Scripts that never call ``outlast.init()``: run as under torchrun, and watched."""
