"""What differs for XLA's compiler for NVIDIA's GPUs: rules for it alone."""
