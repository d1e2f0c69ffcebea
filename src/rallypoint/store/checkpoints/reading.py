"""Reads a checkpoint of another library: weights by name, the optimizer's state by parameter name, the step."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rallypoint.errors import DataError
from rallypoint.store.checkpoints.dcp import METADATA, read_dcp
from rallypoint.store.checkpoints.format import MODEL_FILE

_INDEX = f"{MODEL_FILE}.index.json"  # of a Hugging Face folder with several files
_OF_DDP = "module."
_STATE = "state."
_RIGHT = (
    "write it by parameter name, as torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns it"
)
_BY_NUMBER = f"its optimizer's state is by number, as optimizer.state_dict() has it: {_RIGHT}"
_NO_STATES = f"its optimizer's state is not one of each parameter: {_RIGHT}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        model: parameters and buffers by name, without the prefix of DistributedDataParallel.
        optimizer: parameter name -> tensors and numbers by name; empty if the checkpoint has none.
        step: the steps of training in it; -1 if it does not say.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    step: int = -1

    def named_as(self, names: Collection[str]) -> Checkpoint:
        """The checkpoint with DistributedDataParallel's prefix again, if it lacks it and all of `names` have it."""
        if not names or not all(name.startswith(_OF_DDP) for name in names) or not self.model.keys().isdisjoint(names):
            return self
        model = {f"{_OF_DDP}{name}": tensor for name, tensor in self.model.items()}
        return Checkpoint(model, {f"{_OF_DDP}{name}": state for name, state in self.optimizer.items()}, self.step)


def read_checkpoint(place: Path) -> Checkpoint:
    """Return the checkpoint in a ``.safetensors`` or ``.pt`` file, a Hugging Face folder, or a folder of DCP.

    A ``.pt`` file is read with weights_only=True; of a DCP folder its list of tensors is a pickle, of which only the
    format's own classes are read. Raises DataError for anything else.
    """
    try:
        if place.is_dir():
            return _of_directory(place)
        if place.suffix == ".safetensors":
            return Checkpoint(_plain(load_file(place)))
        if place.is_file():
            return _of_torch(torch.load(place, map_location="cpu", weights_only=True))
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{place} lacks a file: {error.filename or error}") from None
    except Exception as error:  # torch and safetensors report a damaged file by many types
        raise DataError(f"{place} cannot be read as a checkpoint: {error}") from None
    raise DataError(
        f"there is no checkpoint {place}: give a .safetensors or .pt file, a folder with {MODEL_FILE}, or one of "
        "torch.distributed.checkpoint"
    )


def _of_directory(folder: Path) -> Checkpoint:
    if not (folder / METADATA).exists():
        return Checkpoint(_of_folder(folder))
    for name in (MODEL_FILE, _INDEX):
        if (folder / name).exists():
            raise DataError(f"{folder} has both {METADATA} and {name}: which of them is the checkpoint? Move one away")
    return _of_keys(read_dcp(folder))


def _of_folder(folder: Path) -> dict[str, torch.Tensor]:
    files = [MODEL_FILE]
    if not (folder / MODEL_FILE).is_file() and (folder / _INDEX).is_file():  # an index beside it is of an older model
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        if any("/" in name for name in files):
            raise DataError(f"{folder / _INDEX} names files outside of its folder")
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= load_file(folder / name)
    return _plain(found)


def _of_keys(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint of DCP: see `checkpoints.dcp` for its keys. One without "model." is a model's state alone."""
    step = int(tensors["step"]) if "step" in tensors else -1
    weights = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    if not any(key.startswith("optimizer.") for key in tensors) and len(weights) < len(tensors) - ("step" in tensors):
        return Checkpoint(_plain({key: value for key, value in tensors.items() if key != "step"}), step=step)
    flat = {key.removeprefix("optimizer."): value for key, value in tensors.items() if key.startswith("optimizer.")}
    return Checkpoint(_plain(weights), _by_name(_nested(flat), weights), step)


def _of_torch(content: Any) -> Checkpoint:
    if not isinstance(content, dict):
        raise DataError(f"it holds a {type(content).__name__}, not a dict of tensors")
    if not isinstance(content.get("model"), Mapping):
        return Checkpoint(_plain(content))
    whole = content.get("optimizer") or {}
    states = whole.get("state", whole) if isinstance(whole, Mapping) else whole
    if isinstance(states, Mapping) and any(str(key).startswith(_STATE) for key in states):
        states = _nested(states)
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise DataError(_NO_STATES)
    optimizer = {
        str(name): {kind: _tensor(value) for kind, value in state.items() if value is not None}
        for name, state in states.items()
    }
    return Checkpoint(_plain(content["model"]), _by_name(optimizer, content["model"]), int(content.get("step", -1)))


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu")


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states in ``state.NAME.KIND``: parameter name -> kind -> value. Settings (``param_groups.``) are left out."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_STATE):
            name, _, kind = key.removeprefix(_STATE).rpartition(".")
            states.setdefault(name, {})[kind] = value
    return states


def _by_name(
    optimizer: dict[str, dict[str, torch.Tensor]], weights: Mapping[str, object]
) -> dict[str, dict[str, torch.Tensor]]:
    """The states that have something; without DistributedDataParallel's prefix, if all have it and the weights not."""
    known = set(_plain(weights))
    if any(name.isdecimal() and name not in known for name in optimizer):
        raise DataError(_BY_NUMBER)
    if all(name.startswith(_OF_DDP) for name in optimizer) and not known.issuperset(optimizer):
        optimizer = {name.removeprefix(_OF_DDP): state for name, state in optimizer.items()}
    return {name: state for name, state in optimizer.items() if state}


def _plain(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Only the tensors; without DistributedDataParallel's prefix, if all have it."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if tensors and all(name.startswith(_OF_DDP) for name in tensors):
        return {name.removeprefix(_OF_DDP): value for name, value in tensors.items()}
    return tensors
