"""Ready-made models to train: `python -m rallypoint.recipes.gpt`, or `rallypoint train gpt`.

This module is only the list of recipes: to read it takes no torch.
"""

from __future__ import annotations

RECIPES = {"gpt": "rallypoint.recipes.gpt", "resnet": "rallypoint.recipes.resnet"}
"""The module of each recipe; its `main(argv)` trains and returns the exit status."""
