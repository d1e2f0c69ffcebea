"""What the recipes share: the settings of a training, options of the command line, and a model's files."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import msgspec
import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from rallypoint.errors import ConfigError, DataError, RallypointError
from rallypoint.launch import environment
from rallypoint.observe.lenient import encode_all, say

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "model.json"
_PAUSES_S = (1.0, 60.0)  # the first pause before a model is saved again, which doubles, and the longest


Precision = Literal["fp32", "bf16", "fp16"]  # what forward passes are computed in


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained. `batch`: samples per replica; `lr`: the highest rate, after `warmup` steps."""

    steps: int
    batch: int
    lr: float
    warmup: int
    weight_decay: float
    replicas: int = 2
    accumulate: int = 1
    seed: int = 1234
    validate_every: int = 50
    patience: int = 0
    precision: Precision = "fp32"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `job.train` that every recipe gives."""
        given = ("replicas", "batch", "steps", "accumulate", "seed", "precision")
        return {name: getattr(self, name) for name in given}


STEPS = typer.Option(min=1, help="Updates of the model.")
REPLICAS = typer.Option(
    min=1, help="Logical data-parallel replicas, fixed for the run however many workers come and go."
)
BATCH = typer.Option(min=1, help="Samples per replica: the global batch is replicas times this.")
ACCUMULATE = typer.Option(min=1, help="Micro-batches whose gradients add up before anything is sent.")
LR = typer.Option(min=0.0, help="Highest learning rate: reached after the warm-up, then a cosine.")
VALIDATE_EVERY = typer.Option(min=1, help="Steps between validations.")
PATIENCE = typer.Option(min=0, help="End after so many validations that were no better (0: never).")
PRECISION = typer.Option(help="bf16, fp16: forward passes in torch.autocast, parameters in fp32; fp16 scales losses.")
DEVICE = typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
OUT = typer.Option(help="Folder for the trained model. Default: the run folder.")


class SavedModel(nn.Module):
    """A model that a folder holds: `model.safetensors` (tied weights once, buffers) and `model.json` (`config`)."""

    config_type: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save(self, folder: Path) -> None:
        """Write both files into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, str(folder / WEIGHTS_FILE))
        (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.config)) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the model that `save` wrote into `folder`, on the CPU, in eval mode.

        Raises `DataError` if there is none.
        """
        try:
            model = cls(msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=cls.config_type))
            load_model(model, str(folder / WEIGHTS_FILE))
        except FileNotFoundError as missing:
            raise DataError(
                f"{folder} holds no trained {cls.__name__} ({CONFIG_FILE} and {WEIGHTS_FILE}): give the run folder "
                "that the training printed at its end"
            ) from missing
        except (msgspec.MsgspecError, SafetensorError) as broken:
            raise DataError(f"{folder} holds no whole {cls.__name__} ({broken}): give another run folder") from broken
        return model.eval()


def save_patiently(
    save: Callable[[Path], None], folder: Path, *, pause: Callable[[float], object] = time.sleep
) -> None:  # fmt: skip
    """Call `save(folder)` until it succeeds: the model exists only in this process, and a full disk may get room again.

    Says once why it waits. Ctrl-C ends the wait, and the process.
    """
    seconds = _PAUSES_S[0]
    while True:
        try:
            save(folder)
        except (OSError, SafetensorError) as error:
            if seconds == _PAUSES_S[0]:
                say(
                    f"the model cannot be saved in {folder} ({error}): this process holds it and waits; make room "
                    "there. Ctrl-C gives it up"
                )
        else:
            return
        pause(seconds)
        seconds = min(2 * seconds, _PAUSES_S[1])


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU if there is one.

    Of several GPUs each process of this machine takes its own (by LOCAL_RANK, as torch counts them). Raises
    `ConfigError` for a device that is missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as unknown:
        raise ConfigError(f"{name!r} is no device: give --device cpu, cuda, cuda:1 or auto") from unknown
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} was asked for, but torch sees {torch.cuda.device_count()} GPUs: try auto")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", place_among_gpus(os.environ, torch.cuda.device_count()))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before the first tensor is there: a DeviceMesh asks for the current device
    return device


def place_among_gpus(environ: Mapping[str, str], gpus: int) -> int:
    """Return which of the `gpus` that this process sees is its own. Workers share GPUs where there are too few of them;
    ranks of one worker cannot (NCCL): ConfigError."""
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if environment.RANKS in environ and ranks > gpus:
        raise ConfigError(
            f"this worker has {ranks} ranks and sees {gpus} GPU{'s' if gpus > 1 else ''}: each rank needs one of its "
            f"own; give --ranks {gpus}, or --device cpu"
        )
    return int(environ.get("LOCAL_RANK", "0")) % gpus


def as_typed(path: str | Path) -> str:
    """Return a path as one would type it here: relative if it lies below the current folder."""
    try:
        return shlex.quote(str(Path(path).absolute().relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(path))


def exit_status(app: typer.Typer, argv: list[str] | None, *, program: str) -> int:
    """Run a recipe's command line on `argv` (default: this process's) and return its exit status.

    An error of Rallypoint is printed as a sentence on stderr, with status 1 and without a traceback.
    """
    encode_all()
    try:
        app(args=argv, prog_name=program)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except RallypointError as error:
        say(f"error: {error}", error=True)
        return 1
    return 0
