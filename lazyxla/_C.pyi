# The extension module, see csrc/bindings/. Its functions are used inside this package only.
from typing import Any

def __getattr__(name: str) -> Any: ...
