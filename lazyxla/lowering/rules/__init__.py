"""One file of lowering rules per operator family; every module in this package is loaded by the registry."""
