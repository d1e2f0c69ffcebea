"""A probe of this process's kernels: a small computation whose digest is the same wherever kernels give the same bytes.

Two workers with another digest cannot audit each other (`core.audits.alike`). An equal digest is a strong hint
and no proof: a model may use a kernel that the probe does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import xxhash

_LONG = 1 << 16  # elements: more than torch's grain size, so that sums are cut as for several threads
_DTYPES = (torch.float32, torch.bfloat16)


def kernels_of(device: torch.device | str = "cpu") -> bytes:
    """Return the digest (XXH3-128, 16 bytes) of a small forward and backward pass on `device`, in fp32 and bf16.

    Inputs are made from whole numbers: no generator is asked, and none moves. It takes some milliseconds (on a GPU
    more, because its kernels are loaded), and changes no setting of torch. Settings that change bytes (TF32, the
    number of threads) count. So do the version of torch and the device's name.
    """
    device = torch.device(device)
    found = xxhash.xxh3_128(f"{torch.__version__} {_name(device)}".encode())
    cudnn = torch.backends.cudnn
    same = cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), same:
        for dtype in _DTYPES:
            for result in _passes(device, dtype):
                found.update(result.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _passes(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """The loss, what leads to it, and the gradients."""
    images, filters = _made((4, 3, 16, 16), 7, device, dtype), _made((8, 3, 3, 3), 11, device, dtype)
    weights, scale = _made((2048, 96), 13, device, dtype), _made((96,), 17, device, dtype)
    leaves = [leaf.requires_grad_() for leaf in (images, filters, weights, scale)]
    hidden = F.gelu(F.conv2d(images, filters, padding=1)).flatten(1)
    hidden = F.layer_norm(hidden @ weights, (96,), scale)
    loss = (F.softmax(hidden, -1) * torch.exp(-hidden.abs())).sum() + hidden.square().mean()
    gradients = torch.autograd.grad(loss, leaves)
    long = _made((_LONG,), 19, device, dtype)
    return [hidden, loss, long.exp().sum(), long.square().mean(), long.tanh().norm(), long.abs().sqrt(), *gradients]


def _made(shape: tuple[int, ...], prime: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Numbers from -1.625 to 1.625 in steps of 1/32, which both types hold exactly, in no simple order."""
    count = torch.Size(shape).numel()
    whole = torch.arange(count, device=device, dtype=torch.int64)
    return ((whole * prime + whole * whole % 89) % 105 - 52).to(dtype).div(32).reshape(shape)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
