"""The formats of checkpoints, by name. Importing this loads no torch: the command line does."""

from __future__ import annotations

from typing import Literal

Format = Literal["safetensors", "pt", "hf", "dcp"]
MODEL_FILE = "model.safetensors"  # in a Hugging Face folder
