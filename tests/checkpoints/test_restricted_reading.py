"""A checkpoint that is damaged, or made to run something, is refused with a sentence."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_training import build
from safetensors.torch import save_file

from rallypoint.errors import DataError
from rallypoint.store import checkpoints
from rallypoint.store.checkpoints import read_checkpoint


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints.write_dcp({"model": build().state_dict(), "step": 1000}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("beside", ["model.safetensors", "model.safetensors.index.json", ""])
def test_a_list_of_tensors_that_runs_something_is_refused(beside: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    if beside:
        save_file({"weight": torch.ones(1)}, folder / beside)
    with pytest.raises(DataError, match=f"has both .metadata and {beside}" if beside else "which no such list needs"):
        read_checkpoint(folder)
    assert not marker.exists()


def test_a_list_of_tensors_names_no_file_outside_of_its_folder(saved: Path) -> None:
    content = pickle.loads((saved / ".metadata").read_bytes())
    for about in content.storage_data.values():
        about.relative_path = f"../saved/{about.relative_path}"
    (saved / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="outside of its folder"):
        read_checkpoint(saved)


def test_a_step_may_be_a_plain_number(saved: Path, tmp_path: Path) -> None:
    assert read_checkpoint(saved).step == 1000
    checkpoints.write_dcp({"model": build().state_dict(), "step": "1000"}, tmp_path / "text")
    with pytest.raises(DataError, match="its step is neither a tensor nor a whole number"):
        read_checkpoint(tmp_path / "text")


@pytest.mark.parametrize("left", [0, 100, -1])
def test_missing_and_truncated_files_are_named(left: int, saved: Path) -> None:
    [file] = saved.glob("*.distcp")
    os.truncate(file, left) if left >= 0 else file.unlink()
    with pytest.raises(DataError, match=r"saved (lacks a file|cannot be read)"):
        read_checkpoint(saved)


def test_a_failure_in_torch_comes_out_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    failures: list[BaseException] = [OSError(28, "No space left"), ValueError("bad"), KeyboardInterrupt()]
    for failure, expected in zip(failures, (OSError, RuntimeError, KeyboardInterrupt), strict=True):

        def fail(*args: object, error: BaseException = failure) -> None:
            raise error

        monkeypatch.setattr(FileSystemWriter, "write_data", fail)
        with pytest.raises(expected):
            checkpoints.write_dcp({"model": {"weight": torch.ones(1)}}, tmp_path / "out")


def test_an_old_index_beside_the_model_is_not_read(tmp_path: Path) -> None:
    """As a job that was exported to a folder that had a model in several files leaves it."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "old.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "old.safetensors"}}')
    assert read_checkpoint(tmp_path).model["weight"].tolist() == [0.0, 0.0]
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).model["weight"].tolist() == [1.0, 1.0]
