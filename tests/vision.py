"""torchvision's models, also beside a torch that its compiled part does not fit."""

from examples.torchvision_import import import_torchvision

_torchvision = import_torchvision()
assert _torchvision is not None  # one of the tests' dependencies

models = _torchvision.models

__all__ = ["models"]
