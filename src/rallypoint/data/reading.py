"""Reading samples: one that raises an error is read again, then named, and skipped or fatal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.data.dataset import MapDataset, NotASample, fetch
from rallypoint.data.randomness import seed_everything
from rallypoint.data.spec import Loader
from rallypoint.errors import DataError


class Reading:
    """Reads the samples of one micro-batch after another.

    Random numbers are seeded before each micro-batch. One of which a sample fails is read again as a whole, so what its
    other samples draw does not depend on the failure.
    """

    def __init__(self, dataset: MapDataset, loader: Loader) -> None:
        self._dataset, self._loader = dataset, loader

    def read(self, indices: Sequence[int], seed: int) -> tuple[list[Any], list[str]]:
        """Return the samples, and what to tell of skipped ones.

        Raises DataError, which names the sample, for one that fails to the last, or if all were to be skipped.
        """
        left, skipped = list(indices), list[str]()
        while True:
            try:
                return self._try(left, seed), skipped
            except NotASample as error:
                raise DataError(str(error)) from error
            except Exception as error:
                bad, cause = self._culprit(left, seed, error)
            where = "a sample" if bad is None else self._name_of(bad)
            what = f"{where} raised {type(cause).__name__}: {cause}"
            if self._loader.on_error == "stop" or bad is None or len(left) == 1:
                tries = f" ({self._loader.retries + 1} times)" if self._loader.retries else ""
                raise DataError(
                    f"{what}{tries}: mend the data set, or leave such samples out with "
                    'loader=rp.Loader(on_error="skip")'
                ) from cause
            left.remove(bad)
            skipped.append(f"{what}; it is left out of its batch")

    def _try(self, indices: list[int], seed: int) -> list[Any]:
        for _ in range(self._loader.retries):
            try:
                return self._once(indices, seed)
            except NotASample:
                raise
            except Exception:
                continue
        return self._once(indices, seed)

    def _once(self, indices: list[int], seed: int) -> list[Any]:
        seed_everything(seed)
        return fetch(self._dataset, indices)

    def _culprit(self, indices: list[int], seed: int, error: Exception) -> tuple[int | None, Exception]:
        """The first sample that fails by itself; None if none does, and `error` is all that is known."""
        seed_everything(seed)
        for index in indices:
            try:
                fetch(self._dataset, [index])
            except NotASample as own:
                raise DataError(str(own)) from own
            except Exception as own:
                return index, own
        return None, error

    def _name_of(self, index: int) -> str:
        name_of = getattr(self._dataset, "name_of", None)
        return f"sample {index} of the data set" if name_of is None else str(name_of(index))
