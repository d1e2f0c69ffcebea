"""Checkpoints of torch.distributed.checkpoint (DCP), in one process, with an optimizer's state by parameter name.

    model.NAME                                   a parameter or buffer
    optimizer.state.NAME.KIND                    ("exp_avg", "step", ...)
    optimizer.param_groups.NAME.SETTING          ("lr", "betas", ...)
    step                                         the steps of training in the model

These are the keys of ``get_state_dict(model, optimizer)`` from `torch.distributed.checkpoint.state_dict` with
``StateDictOptions(flatten_optimizer_state_dict=True)``. Without that option it writes the same keys, but for
`param_groups`, which are then by number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rallypoint.config import JobConfig, settings_of
from rallypoint.config.tree import rate_of
from rallypoint.core.layout import Layout
from rallypoint.core.optimizer import of_shard
from rallypoint.core.schedule import peak_of
from rallypoint.optim import build_optimizer

METADATA = ".metadata"  # the file in the folder of every checkpoint of this kind

_OF_THIS_PROCESS = {"foreach": None}  # how a kernel is run: torch's default again


def write_dcp(content: Mapping[str, Any], folder: Path) -> None:
    """Write a nested dict as a checkpoint into `folder`, which does not exist yet. Raises OSError or RuntimeError."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with _alone():
        save(dict(content), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under their whole keys; what is not a tensor is left out.

    A step that is a Python int is among them, as a tensor. The format keeps its list of tensors (``.metadata``) as a
    pickle: see `checkpoints.restricted`.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from rallypoint.store.checkpoints.restricted import Reader

    reader = Reader(folder)
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    with _alone():
        load(tensors, storage_reader=reader, no_dist=True)
    if isinstance(metadata.state_dict_metadata.get("step"), BytesStorageMetadata):
        tensors["step"] = torch.tensor(reader.whole_number(metadata, "step"), dtype=torch.int64, device="cpu")
    return tensors


def optimizer_content(
    states: Mapping[str, Mapping[str, torch.Tensor | float]], config: JobConfig, layout: Layout, version: int,
    reductions: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the optimizer's part of a checkpoint: `states` by parameter name, and each parameter's settings.

    A rate is that of the next update, after so many `reductions` (``plateau=``). The version of the job is `version`.
    Its base rate is there too, as torch's schedulers look for it (`initial_lr`).
    """
    content: dict[str, Any] = {
        f"state.{name}.{kind}": (
            torch.tensor(value, dtype=torch.float32, device="cpu") if isinstance(value, float) else value
        )
        for name, state in states.items() for kind, value in state.items()
    }  # fmt: skip
    for entry in layout.entries:
        touched = layout.shards_touching(entry.start, entry.stop)
        if entry.spec.group < 0 or not touched:
            continue
        rate = rate_of(config, min(version, config.rounds - 1), reductions)
        base = peak_of(config.applied_schedule)
        spec = of_shard(config.applied, layout.shards[touched[0]].columns)
        settings = settings_of(config, entry.spec.group)
        like = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))  # two dimensions, as Muon asks
        [group] = build_optimizer(spec, [([like], settings)]).param_groups
        group |= {"lr": rate * settings.lr_scale, "initial_lr": base * settings.lr_scale} | _OF_THIS_PROCESS
        content |= {f"param_groups.{entry.spec.name}.{key}": group[key] for key in group if key != "params"}
    return content


@contextmanager
def _alone() -> Iterator[None]:
    """In the body, torch does not warn that no process group is there: none is meant to be.

    torch's own exception, which is no Exception, becomes the first failure in it: OSError, or RuntimeError for others.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, Exception) and not isinstance(first, OSError):
                raise RuntimeError(f"{type(first).__name__}: {first}") from None
            raise first from None
