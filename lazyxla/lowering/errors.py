"""The one error of the lowering."""


class LoweringError(RuntimeError):
    """A node could not be lowered; the message names the operator and its argument types."""
