"""Ready-made models to train: `python -m rallypoint.recipes.gpt`, or `rallypoint train gpt`.

This module holds the list of recipes, and what their command lines share.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.errors import ConfigError, RallypointError
from rallypoint.observe.lenient import encode_all, say

# torch and typer are imported only where they are used, so listing the recipes is fast.
if TYPE_CHECKING:
    import torch
    import typer

RECIPES = {
    "gpt": "rallypoint.recipes.gpt",
    "finetune": "rallypoint.recipes.finetune",
    "resnet": "rallypoint.recipes.resnet",
}
"""The module of each recipe; its `main(argv)` trains and returns the exit status."""

DESCRIPTIONS = {
    "gpt": "A byte-level GPT on any folder of text (default: Python's own standard library).",
    "finetune": "A causal language model of Hugging Face, in a local folder, on any folder of text.",
    "resnet": "A small ResNet with BatchNorm on scikit-learn's handwritten digits.",
}
"""What each recipe does, in one sentence."""


CHECKED = frozenset({"finetune"})
"""Recipes that check their options with `--check`, without torch: before a cluster starts for nothing."""


class Precision(StrEnum):
    """What forward passes are computed in, as choices of a recipe's command line."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


PRECISION_HELP = "bf16, fp16: forward passes in torch.autocast, parameters in fp32; fp16 scales losses."

_PAUSES_S = (1.0, 60.0)  # the first pause before a model is saved again, which doubles, and the longest

__all__ = [
    "CHECKED", "DESCRIPTIONS", "PRECISION_HELP", "RECIPES", "Precision", "choose_device", "exit_status",
    "save_patiently",
]  # fmt: skip


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU if there is one.

    Raises `ConfigError` for a device that is missing.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as unknown:
        raise ConfigError(f"{name!r} is no device: give --device cpu, cuda, cuda:1 or auto") from unknown
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} was asked for, but torch sees {torch.cuda.device_count()} GPUs: try auto")
    return device


def as_typed(path: str | Path) -> str:
    """Return a path as one would type it here: relative if it lies below the current folder."""
    try:
        return shlex.quote(str(Path(path).absolute().relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(path))


def save_patiently(
    save: Callable[[Path], None], folder: Path, *, pause: Callable[[float], object] = time.sleep
) -> None:  # fmt: skip
    """Call `save(folder)` until it succeeds: the model exists only in this process, and a full disk may get room again.

    Says once why it waits. Ctrl-C ends the wait, and the process.
    """
    from safetensors import SafetensorError

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
