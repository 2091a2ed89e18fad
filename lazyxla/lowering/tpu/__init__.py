"""What differs for XLA's TPU compiler: its builder, and rules for it alone."""
