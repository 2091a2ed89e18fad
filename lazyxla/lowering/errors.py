"""The one error of the lowering."""


class LoweringError(RuntimeError):
    """A node could not be lowered; the message names the operator and its argument types.

    ``node`` is the node's position in ``Program.nodes``; None until the lowering knows it.
    """

    node: int | None = None
