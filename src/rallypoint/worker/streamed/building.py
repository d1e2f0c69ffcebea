"""Prepares a model for streamed parameters: those on the meta device get a place without memory, buffers get values."""

from __future__ import annotations

import torch

from rallypoint.config import JobConfig
from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seeded
from rallypoint.errors import ConfigError, ModelError
from rallypoint.worker.streamed.first_values import Init, initialise
from rallypoint.worker.streamed.memory import empty_like


def prepare(model: torch.nn.Module, config: JobConfig, init: Init | None) -> frozenset[str]:
    """Take a model's trained parameters off the meta device. Returns the names of those that have no values yet.

    Does nothing where parameters are not streamed.

    They get a shape without memory on the device of the model's other tensors, else on torch's default one. Buffers on
    the meta device get memory, and the values that ``reset_parameters()`` and `init` give them.

    Raises ModelError for a model whose parameters cannot be streamed, ConfigError for `init` where they are not.
    """
    if not config.streamed or not isinstance(model, torch.nn.Module):  # (ModelTensors says what is wrong)
        if init is not None:
            raise ConfigError('init= is for models on the meta device, with parameters="streamed": leave it out')
        return frozenset()
    _check(model)
    device = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None)
    if device is None:  # the script's default; where that is the meta device, the CPU
        device = torch.get_default_device()
        device = torch.device("cpu") if device.type == "meta" else device
    made: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for owner, module in model.named_modules():
        _fill_buffers(module, owner, device, config.seed, init)
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            name = f"{owner}.{leaf}" if owner else leaf
            if not parameter.requires_grad:
                raise ModelError(f"{name} is frozen and on the meta device: frozen parameters need values; load them")
            if id(parameter) not in made:
                made[id(parameter)] = name, torch.nn.Parameter(empty_like(parameter, device))
            setattr(module, leaf, made[id(parameter)][1])
    return frozenset(name for name, _ in made.values())


def _fill_buffers(
    module: torch.nn.Module, owner: str, device: torch.device, seed: int, init: Init | None
) -> None:
    empty = [leaf for leaf, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    if not empty:
        return
    for leaf in empty:
        buffer = module._buffers[leaf]
        assert buffer is not None
        if buffer.dtype == torch.bool:
            raise _without_values(owner, leaf)
        unset = torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
        module._buffers[leaf] = torch.full(buffer.shape, unset, dtype=buffer.dtype, device=device)
    with seeded(derive_seed(seed, "init", owner)), torch.no_grad():
        parameters = dict(module._parameters)
        try:
            for leaf, parameter in parameters.items():
                module._parameters[leaf] = None if parameter is None else torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                )
            initialise(module, init)
        finally:
            module._parameters.update(parameters)
    for leaf in empty:
        buffer = module._buffers[leaf]
        assert buffer is not None
        left = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
        if left.any():
            raise _without_values(owner, leaf)


def _without_values(owner: str, leaf: str) -> ModelError:
    return ModelError(
        f"buffer {owner}.{leaf} was built on the meta device, and nothing gives it values: build it on the CPU "
        "(register_buffer(..., torch.ones(n, device='cpu'))), or set it in init="
    )


def _check(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f'{name} is TorchScript, which reads parameters unseen: parameters="streamed" cannot')
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise ModelError(
                f'{name or type(module).__qualname__} is compiled, and compiled code reads parameters unseen: with '
                'parameters="streamed" leave torch.compile out'
            )
        if getattr(module, "max_norm", None) is not None:
            raise ModelError(
                f'{name} has max_norm, which writes into its weight: parameters="streamed" would lose that'
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta:
            continue
        if type(parameter) is not torch.nn.Parameter:
            raise ModelError(f'{name} is a {type(parameter).__qualname__}: parameters="streamed" needs plain ones')
        if parameter.dtype != torch.float32:
            raise ModelError(f'{name} is {parameter.dtype}: parameters="streamed" needs float32')
        if not parameter.is_contiguous():
            raise ModelError(f'{name} is not contiguous: with parameters="streamed" make it so (.contiguous())')
