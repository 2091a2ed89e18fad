"""What differs for XLA's CPU compiler: its builder, and rules for it alone."""
