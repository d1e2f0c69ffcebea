"""A payload's bytes as tensors, and checks of a codec's arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rallypoint.codec.base.protocol import NonFinitePayload
from rallypoint.codec.base.scratch import pieces
from rallypoint.errors import ProtocolError, UsageError

ALIGNMENT = 4  # bytes


def checked(values: Tensor) -> Tensor:
    """Return the tensor without its graph. Raises UsageError unless it is 1-D, contiguous, fp32 and on the CPU."""
    if values.dtype is not torch.float32 or values.dim() != 1 or values.device.type != "cpu":
        raise UsageError(
            f"a codec works on 1-D float32 tensors on the CPU, not on {values.dim()}-D {values.dtype} on "
            f"{values.device}: pass values.reshape(-1).float().cpu()"
        )
    if not values.is_contiguous():
        raise UsageError(f"a codec works on contiguous tensors, not on one of stride {values.stride(0)}: copy it first")
    return values.detach()


def room(out: memoryview, nbytes: int) -> Tensor:
    """Return the first `nbytes` of `out` as uint8. Raises UsageError when it is too small, read-only or not aligned."""
    if out.readonly or not out.c_contiguous or out.nbytes < nbytes:
        raise UsageError(f"a payload of {nbytes} bytes does not fit a buffer of {out.nbytes}: it must be writable too")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    body = torch.frombuffer(out, dtype=torch.uint8, count=nbytes)
    if body.data_ptr() % ALIGNMENT:
        raise UsageError(f"a payload must be written to an address that is a multiple of {ALIGNMENT}")
    return body


def body_of(payload: memoryview) -> Tensor:
    """Return a payload's bytes as uint8 on a 4-byte boundary, without a copy where possible."""
    if not payload.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if not payload.readonly and payload.c_contiguous:
        body = torch.frombuffer(payload, dtype=torch.uint8)
        if body.data_ptr() % ALIGNMENT == 0:
            return body
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def body_of_exactly(payload: memoryview, nbytes: int, words: int) -> Tensor:
    """Return `body_of(payload)`. Raises ProtocolError when the payload is not `nbytes` long."""
    if payload.nbytes != nbytes:
        raise ProtocolError(f"a payload of {payload.nbytes} bytes for {words} words: {nbytes} were expected")
    return body_of(payload)


def all_finite(values: Tensor) -> bool:
    """True if there is neither NaN nor infinity.

    Usually one pass: a sum is finite only if its terms are, save for overflow.
    """
    if math.isfinite(float(values.sum())):
        return True
    return all(bool(torch.isfinite(values[start:stop]).all()) for start, stop in pieces(values.numel()))


def require_finite(values: Tensor, format_name: str) -> None:
    """Raise NonFinitePayload unless all values are finite."""
    if not all_finite(values):
        raise nonfinite(format_name)


def nonfinite(format_name: str) -> NonFinitePayload:
    """Return the error to raise for values that are not finite."""
    return NonFinitePayload(
        f"the values to send hold NaN or infinity, which {format_name} cannot carry: skip the step, or send it raw"
    )


def within(numbers: Tensor, low: float, high: float, what: str) -> None:
    """Raise ProtocolError unless every one of `numbers` is in low..high (a NaN never is)."""
    if numbers.numel():
        least, most = float(numbers.amin()), float(numbers.amax())
        if not (low <= least and most <= high):
            raise ProtocolError(f"a payload has {what} from {least} to {most}: {low} to {high} are possible")
