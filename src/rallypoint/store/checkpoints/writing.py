"""Writes a model, and what else a snapshot has of it, as a checkpoint: one writer for each format."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rallypoint.config.resolve import parse
from rallypoint.config.tree import steps_plainly
from rallypoint.core.job import JobRecord
from rallypoint.errors import SnapshotFailed
from rallypoint.store.checkpoints.dcp import optimizer_content, write_dcp
from rallypoint.store.checkpoints.format import MODEL_FILE, Format
from rallypoint.store.manifest import Manifest

OptimizerState = dict[str, dict[str, torch.Tensor | float]]


@dataclass(frozen=True, slots=True)
class Content:
    """What is written.

    Attributes:
        manifest: of the snapshot.
        model: parameters and buffers by name; the names of one tied tensor share its memory.
        optimizer: each trained parameter's state; None if the writer does not take it.
        average: True if the parameters are their average.
    """

    manifest: Manifest
    model: dict[str, torch.Tensor]
    optimizer: OptimizerState | None
    average: bool

    @property
    def steps(self) -> int:
        """Steps of training in the model."""
        return self.manifest.job.steps_at(self.manifest.version)


class Writer(Protocol):
    """Writes one format.

    Example::

        class Names:
            def check(self, to):
                pass

            def takes_optimizer(self, job):
                return False

            def write(self, content, to):
                to.write_text("\\n".join(content.model))
                return []
    """

    def check(self, to: Path) -> None:
        """Raise SnapshotFailed, before the snapshot is read, where nothing can be written."""
        ...

    def takes_optimizer(self, job: JobRecord) -> bool:
        """True if the optimizer's state of this job is written."""
        ...

    def write(self, content: Content, to: Path) -> list[str]:
        """Write it, as a whole or not at all. Returns remarks for the user. Raises SnapshotFailed."""
        ...


class TorchFile:
    """A file with {"model", "optimizer", "step"}, which torch.load reads with weights_only=True."""

    def check(self, to: Path) -> None:
        """Any file may be written over."""

    def takes_optimizer(self, job: JobRecord) -> bool:
        """Always, also one that is not of plain training."""
        return True

    def write(self, content: Content, to: Path) -> list[str]:
        """Write the file."""
        whole: dict[str, object] = {"model": content.model, "optimizer": content.optimizer, "step": content.steps}
        _write(to, lambda path: _save_all(whole, path))
        return []


class Safetensors:
    """A file with the model, and with its version and fingerprint as metadata. Each tied tensor under all its names."""

    def check(self, to: Path) -> None:
        """Any file may be written over."""

    def takes_optimizer(self, job: JobRecord) -> bool:
        """Never."""
        return False

    def write(self, content: Content, to: Path) -> list[str]:
        """Write the file."""
        names = content.manifest.job.tied.keys() & content.model
        apart = {name: content.model[name].clone() for name in names}  # safetensors accepts no shared memory
        _write(to, lambda path: _save_model(content.model | apart, path, _about(content)))
        return []


class HuggingFace(Safetensors):
    """``model.safetensors`` in a folder, with each tied tensor once."""

    def write(self, content: Content, to: Path) -> list[str]:
        """Write that file, and leave others alone."""
        tied = content.manifest.job.tied
        once = {name: tensor for name, tensor in content.model.items() if name not in tied}
        _write(to / MODEL_FILE, lambda path: _save_model(once, path, _about(content)))
        if (to / "config.json").exists():
            return []
        return [f"it has no config.json yet, which model.config.save_pretrained({str(to)!r}) writes"]


class Dcp:
    """A new folder, a checkpoint of torch.distributed.checkpoint: see `checkpoints.dcp`."""

    def check(self, to: Path) -> None:
        """Refuse a folder that is there."""
        if to.is_symlink() or to.exists():
            raise SnapshotFailed(f"{to} is there already: a checkpoint of this format is a new folder")

    def takes_optimizer(self, job: JobRecord) -> bool:
        """If it is one of plain training (see `steps_plainly`)."""
        return steps_plainly(parse(job.config))

    def write(self, content: Content, to: Path) -> list[str]:
        """Write the folder."""
        step = torch.tensor(content.steps, dtype=torch.int64, device="cpu")
        manifest, whole = content.manifest, {"model": content.model, "step": step}
        remarks = ["without the optimizer's state, which is not one of plain training"]
        if content.optimizer is not None:
            remarks, job, reductions = [], manifest.job, len(manifest.decided.reductions)
            whole["optimizer"] = optimizer_content(
                content.optimizer, parse(job.config), job.layout, manifest.version, reductions,
            )  # fmt: skip
        _write(to, lambda path: write_dcp(whole, path))
        return remarks


WRITERS: Mapping[Format, Writer] = {
    "pt": TorchFile(), "safetensors": Safetensors(), "hf": HuggingFace(), "dcp": Dcp(),
}  # fmt: skip


def _about(content: Content) -> dict[str, str]:
    job = content.manifest.job
    about = {"format": "pt", "version": str(content.manifest.version), "fingerprint": job.layout.fingerprint}
    return about | ({"average": str(job.config["average"]["type"])} if content.average else {})


def _save_all(content: dict[str, object], path: Path) -> None:
    """Write a torch file, the same bytes every time: given a path, torch writes its name into the file."""
    with open(path, "wb") as file:
        torch.save(content, file)


def _save_model(model: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a safetensors file, the same bytes every time.

    The library writes metadata in any order. So this function sorts it, in the header: 8 bytes with its length, then
    JSON, which spaces may fill up. Raises SnapshotFailed for a type that the format has not.
    """
    for name, tensor in model.items():
        if tensor.dtype in (torch.complex128, torch.complex32):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise SnapshotFailed(f"{name} is {kind}, which safetensors cannot hold: export to a file model.pt")
    save_file(model, path, metadata=about)
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(about.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _write(to: Path, write: Callable[[Path], None]) -> None:
    """Write `to` as a whole: under another name first, then renamed."""
    partial = to.with_name(f".{to.name}.{uuid.uuid4().hex}.partial")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        os.replace(partial, to)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
        raise SnapshotFailed(f"{to} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.unlink()
