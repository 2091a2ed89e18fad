"""Packed sequences: nn.utils.rnn's functions as gathers by indices that the host computes.

PyTorch slices the steps one by one. Other lengths would make another program, and its gradient
would grow with the number of steps. Here the lengths are data: a program depends on their sum. Each
row has one place, so that gradients are gathers, too, by the inverse of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazyxla.argument_checks.tables import dtype_name, require

_aten = torch.library.Library("aten", "IMPL")


class Padded(NamedTuple):
    """Sequences of the same length, as the tensor of a batch."""

    lengths: Tensor | None = None

    def spread(self, gates: Tensor) -> Tensor:
        return gates

    def gathered(self, output: Tensor) -> Tensor:
        return output


class Packed(NamedTuple):
    """The steps of sequences of falling lengths, step by step without gaps.

    Attributes:
        steps, samples: of the batch.
        lengths: int64 (samples,).
        rows: int64 (steps * samples,), of the packed data; -1 where a sequence has ended.
        places: int64 (rows of the data,): step * samples + sample of each.
    """

    steps: int
    samples: int
    lengths: Tensor
    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, batch_sizes: Tensor, device: torch.device) -> Packed:
        steps, samples = len(batch_sizes), int(batch_sizes[0])
        present = torch.arange(samples) < batch_sizes.unsqueeze(1)
        places = present.flatten().nonzero().flatten()
        rows = torch.full([steps * samples], -1)
        rows[places] = torch.arange(len(places))
        return cls(steps, samples, *(x.to(device) for x in (present.sum(0), rows, places)))

    def spread(self, packed: Tensor) -> Tensor:
        """From (rows, ...) to (steps, samples, ...), with zeros where a sequence has ended."""
        padded: Tensor = _Rows.apply(packed, self.rows, self.places)
        return padded.unflatten(0, (self.steps, self.samples))

    def gathered(self, padded: Tensor) -> Tensor:
        packed: Tensor = _Rows.apply(padded.flatten(0, 1), self.places, self.rows)
        return packed


class _Rows(torch.autograd.Function):
    """The rows of `x` at an index, zeros where it is negative; the gradient has the inverse one."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        missing = (index < 0).reshape(-1, *[1] * (x.dim() - 1))
        return x.index_select(0, index.clamp(min=0)).masked_fill(missing, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _Rows.apply(grads[0], inverse, index), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Rows.apply(tangents[0], *ctx.saved_tensors)


def install() -> None:
    """Registers the device's implementations. Once per process."""
    _aten.impl("_pack_padded_sequence", _pack, "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _aten.impl("_pack_padded_sequence_backward", _pack_backward, key)
        _aten.impl("_pad_packed_sequence", _pad, key)


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's own on the CPU, of the rows' numbers; it also checks the lengths."""
    _require_on_host(lengths)
    if x.dim() < 2 or x.numel() == 0:
        data, batch_sizes = torch._pack_padded_sequence(x.cpu(), lengths, batch_first)
        return data.to(x.device), batch_sizes
    numbers = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
    rows, batch_sizes = torch._pack_padded_sequence(numbers, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, rows.to(x.device)), batch_sizes


def _require_on_host(lengths: Tensor) -> None:
    """Lengths on the device would lead back here: PyTorch's operator is chosen by theirs, too."""
    require(
        lengths.device.type == "cpu",
        f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D "
        f"{lengths.device} {dtype_name(lengths.dtype)} tensor",
    )


def _pack_backward(
    grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    samples, steps, *features = input_size
    if not batch_first:
        samples, steps = steps, samples
    if len(grad):
        found = Packed.of(batch_sizes, grad.device).spread(grad)
        rest = grad.new_zeros([steps - len(found), samples, *features])
        found = torch.cat([found, rest]) if len(rest) else found
    else:
        found = grad.new_zeros([steps, samples, *features])
    return found.transpose(0, 1) if batch_first else found


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """PyTorch's own on the CPU, of the rows' numbers; it also checks the arguments."""
    _require_on_host(batch_sizes)
    numbers = torch.arange(len(data))
    rows, lengths = torch._pad_packed_sequence(numbers, batch_sizes, False, -1, total_length)
    index = rows.flatten()
    places = (index >= 0).nonzero().flatten()
    padded: Tensor = _Rows.apply(data, index.to(data.device), places.to(data.device))
    padded = padded.unflatten(0, rows.shape)
    if padding_value != 0:
        missing = (rows < 0).to(data.device)
        padded = padded.masked_fill(
            missing.reshape(*rows.shape, *[1] * (data.dim() - 1)), padding_value
        )
    return padded.transpose(0, 1) if batch_first else padded, lengths
