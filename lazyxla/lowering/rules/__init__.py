"""One file of lowering rules per operator family; the registry loads every module in here."""
