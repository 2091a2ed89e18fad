"""State of PyTorch's, and what else stands beside a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.step_places import common
from tests.step_places.common import Place, fresh, place, set_scale, unwatched
from tests.support import DEVICE


@place
def warnings_that_are_repeated() -> Place:
    return Place(
        lambda x: x * (0.5 if torch.is_warn_always_enabled() else 1.0),
        [lambda v: torch.set_warn_always(v == 0.5)],
        lambda: torch.set_warn_always(False),
    )


@place
def anomalies_of_nan() -> Place:
    torch.autograd.set_detect_anomaly(True, False)
    return Place(
        lambda x: x * (0.5 if torch.is_anomaly_check_nan_enabled() else 1.0),
        [lambda v: torch.autograd.set_detect_anomaly(True, v == 0.5)],
        lambda: torch.autograd.set_detect_anomaly(False),
    )


@place
def kernel_of_attention_by_the_backend() -> Place:
    return Place(
        lambda x: x * (1.0 if torch._C._get_overrideable_sdp_enabled() else 0.5),
        [lambda v: torch._C._set_sdp_use_overrideable(v == 0.5)],
        lambda: torch._C._set_sdp_use_overrideable(True),
    )


@place
def print_options() -> Place:
    number = torch.tensor(0.12345678)
    return Place(
        lambda x: x * len(str(number)),
        [lambda v: torch.set_printoptions(precision=int(v * 8))],
        lambda: torch.set_printoptions(profile="default"),
    )


@place
def registered_divergence() -> Place:
    kind = fresh(base=torch.distributions.Normal)
    registry: Any = torch.distributions.kl

    def register(value: float) -> None:
        torch.distributions.register_kl(kind, kind)(lambda p, q: p.loc * value * common.SCALE)

    def read(x: torch.Tensor) -> torch.Tensor:
        one = kind(
            torch.ones((), device=DEVICE), torch.ones((), device=DEVICE), validate_args=False
        )
        return x * torch.distributions.kl_divergence(one, one)

    def undo() -> None:
        del registry._KL_REGISTRY[kind, kind]
        registry._KL_MEMOIZE.clear()

    register(1.0)
    return Place(read, [set_scale, register], undo)


@place
def attribute_of_a_gradient() -> Place:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    weight.grad = torch.ones(4, device=DEVICE)
    return Place(
        lambda x: x * weight.detach() * getattr(weight.grad, "scale", 1.0),
        [lambda v: setattr(weight.grad, "scale", v), lambda v: vars(weight.grad).clear()],
    )


class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(f, kinds, args, kwargs or {})
        return out * common.SCALE if f is torch.Tensor.neg else out


@unwatched
def class_of_a_gradient() -> Place:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    weight.grad = torch.ones(4, device=DEVICE).as_subclass(Scaled)
    return Place(lambda x: x * weight.grad.neg().as_subclass(torch.Tensor), [set_scale])
