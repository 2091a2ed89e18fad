"""What is done otherwise for XLA's TPU compiler: its builder, and rules for it alone."""
