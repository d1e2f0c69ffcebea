"""Reads a checkpoint of another library: weights by name, the optimizer's state by parameter name, the step."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
_BY_NUMBER = (
    "its optimizer's state is by number, as optimizer.state_dict() has it: write it by parameter name, with "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)"
)


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
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer.state."):
            name, _, kind = key.removeprefix("optimizer.state.").rpartition(".")
            optimizer.setdefault(name.removeprefix(_OF_DDP), {})[kind] = value
    return Checkpoint(_plain(weights), _by_name(optimizer, weights), step)


def _of_torch(content: Any) -> Checkpoint:
    if not isinstance(content, dict):
        raise DataError(f"it holds a {type(content).__name__}, not a dict of tensors")
    if not isinstance(content.get("model"), Mapping):
        return Checkpoint(_plain(content))
    states: dict[Any, Any] = content.get("optimizer") or {}
    states = states.get("state", states)
    optimizer = {
        str(name).removeprefix(_OF_DDP): {
            kind: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32)
            for kind, value in state.items() if value is not None
        }
        for name, state in states.items()
    }  # fmt: skip
    return Checkpoint(_plain(content["model"]), _by_name(optimizer, content["model"]), int(content.get("step", -1)))


def _by_name(
    optimizer: dict[str, dict[str, torch.Tensor]], weights: Mapping[str, object]
) -> dict[str, dict[str, torch.Tensor]]:
    known = {name.removeprefix(_OF_DDP) for name in weights}
    if any(name.isdecimal() and name not in known for name in optimizer):
        raise DataError(_BY_NUMBER)
    return {name: state for name, state in optimizer.items() if state}


def _plain(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Only the tensors; without DistributedDataParallel's prefix, if all have it."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if tensors and all(name.startswith(_OF_DDP) for name in tensors):
        return {name.removeprefix(_OF_DDP): value for name, value in tensors.items()}
    return tensors
