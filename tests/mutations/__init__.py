"""How many mistakes in lazyxla the tests notice. See __main__.py."""
