"""Names of a checkpoint and names of the script's model: what is left out is said, what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plain_training import BY_NAME, OPTIMIZERS, STEPS, build, data, loss_of, settings
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import rallypoint as rp
from rallypoint import cli
from rallypoint.errors import DataError, UsageError
from rallypoint.launch.commands import importing
from rallypoint.launch.commands.importing import Imported, ImportTask, import_checkpoint
from rallypoint.launch.embedded import ImportJob
from rallypoint.launch.plan import RUN_FILE, Launch, write_plan
from rallypoint.store.checkpoints import read_checkpoint
from rallypoint.store.snapshots import SnapshotStore

WEIGHTS = {name: torch.full((2,), float(number)) for number, name in enumerate(("stem.weight", "stem.bias"))}
STATES = {name: {"exp_avg": tensor + 7, "step": torch.tensor(3.0)} for name, tensor in WEIGHTS.items()}


class Wrapped(torch.nn.Module):
    """Its parameters have the prefix of DistributedDataParallel, and are meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.module = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def run_import(model: torch.nn.Module, place: Path, folder: Path, *, strict: bool = False, **more: Any) -> Imported:
    """What the script's process does."""
    answer, store = folder / "answer", SnapshotStore(str(folder / "snapshots"))
    with ImportJob(ImportTask(str(place), 3, store.url, str(answer), "run", strict=strict)) as job:
        with pytest.raises(SystemExit):
            job.train(model, data(), **settings("adamw", **more))
        job.close()
    return msgspec.json.decode(answer.read_bytes(), type=Imported)


def prefixed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def saved(folder: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    torch.save({"model": model, "optimizer": optimizer}, folder / "plain.pt")
    found = read_checkpoint(folder / "plain.pt")
    return found.model.keys(), found.optimizer.keys()


def test_what_the_scripts_model_lacks_is_said_or_refused(tmp_path: Path) -> None:
    model, frozen = build(), build()
    frozen.back.bias.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"][1](model.parameters())
    loss_of(model, data()[:8]).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=BY_NAME)
    frozen.load_state_dict(weights)
    place = tmp_path / "plain.pt"
    torch.save({"model": weights, "optimizer": state}, place)
    assert run_import(model, place, tmp_path / "whole", strict=True).warnings == ()
    assert run_import(frozen, place, tmp_path / "frozen").warnings == (
        "the checkpoint has optimizer states that the script's model does not train, and they are left out: back.bias",
    )
    torch.save({"model": weights, "optim": state, "sched": {}, "step": 3}, place)
    assert run_import(model, place, tmp_path / "others").warnings == (
        "the checkpoint has parts that are no model, optimizer or step, and they are left out: optim, sched",
    )
    torch.save({"model": weights | {f"head\x1b.{n}": torch.zeros(1) for n in range(10)}, "optimizer": state}, place)
    [said] = run_import(model, place, tmp_path / "more").warnings
    assert "has weights that the script's model does not have, and they are left out: head\\x1b.0, head\\x1b.1" in said
    assert said.endswith("head\\x1b.7 and 2 more")
    with pytest.raises(DataError, match=r"--strict: the checkpoint has weights .* head"):
        run_import(model, place, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict" / "answer").exists()


def test_a_model_whose_own_names_have_the_prefix_of_ddp(tmp_path: Path) -> None:
    model = Wrapped()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, content in enumerate((weights, prefixed(weights), model.module.state_dict())):
        place = tmp_path / f"{number}.safetensors"
        save_file({name: tensor.clone() for name, tensor in content.items()}, place)
        assert run_import(model, place, tmp_path / f"{number}", strict=True).warnings == ()
        assert run_import(build(), tmp_path / "0.safetensors", tmp_path / f"plain{number}", strict=True).warnings == ()


def test_the_prefix_of_ddp_is_taken_off_where_all_names_have_it(tmp_path: Path) -> None:
    whole = WEIGHTS.keys(), STATES.keys()
    assert saved(tmp_path, WEIGHTS, STATES) == whole
    assert saved(tmp_path, prefixed(WEIGHTS), prefixed(STATES)) == whole
    assert saved(tmp_path, prefixed(WEIGHTS), STATES) == whole
    assert saved(tmp_path, WEIGHTS, prefixed(STATES)) == whole
    some, head = prefixed(WEIGHTS) | {"head": torch.zeros(1)}, {"head": {"step": torch.tensor(3.0)}}
    assert saved(tmp_path, some, prefixed(STATES)) == (some.keys(), prefixed(STATES).keys())
    assert saved(tmp_path, some, prefixed(STATES) | head) == (some.keys(), (prefixed(STATES) | head).keys())


def test_a_flattened_state_is_read(tmp_path: Path) -> None:
    flat = {f"state.{name}.{kind}": value for name, state in STATES.items() for kind, value in state.items()}
    flat |= {f"param_groups.{name}.lr": 0.1 for name in STATES}  # type: ignore[dict-item]
    torch.save({"model": prefixed(WEIGHTS), "optimizer": prefixed(STATES)}, tmp_path / "nested.pt")
    torch.save({"model": WEIGHTS, "optimizer": flat}, tmp_path / "flat.pt")
    found, expected = (read_checkpoint(tmp_path / f"{name}.pt").optimizer for name in ("flat", "nested"))
    assert found.keys() == expected.keys() == STATES.keys()
    assert all(torch.equal(found[name]["exp_avg"], STATES[name]["exp_avg"]) for name in STATES)


@pytest.mark.parametrize(
    "state", [[STATES], {"stem.weight": torch.zeros(2)}, {"state": [1]}], ids=["list", "flat", "in"]
)
def test_a_state_that_is_none_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not one of each parameter: .*get_state_dict\(model, optimizer\)"):
        saved(tmp_path, WEIGHTS, state)


def test_a_checkpoint_at_step_0_may_begin_a_job_with_plateau(tmp_path: Path) -> None:
    save_file({n: t.clone() for n, t in build().state_dict().items()}, tmp_path / "model.safetensors")
    task = ImportTask(str(tmp_path / "model.safetensors"), 0, str(tmp_path / "s"), str(tmp_path / "answer"), "run")
    with ImportJob(task) as job:
        with pytest.raises(SystemExit):
            job.train(
                build(), data(), **settings("adamw", **{"evaluation.plateau": rp.ReduceOnPlateau("loss")}, steps=STEPS)
            )
        job.close()
    assert (tmp_path / "answer").exists()


def test_replicas_carry_what_the_script_gives_them_when_a_job_begins_with_a_checkpoint(tmp_path: Path) -> None:
    model = build()
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    run_import(model, tmp_path / "plain.pt", tmp_path, carry=torch.tensor([5.0, 6.0]))
    store = SnapshotStore(str(tmp_path / "snapshots"))
    manifest = store.latest_usable(lambda text: None)
    assert manifest is not None
    carried = [shard.index for shard in manifest.job.layout.shards if shard.replica is not None]
    assert carried
    for record in store.read(manifest, carried):
        assert record.arrays["master"].tolist() == [5.0, 6.0]


def test_overwrite_deletes_the_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, place = tmp_path / "run", tmp_path / "model.pt"
    plan = Launch(worker=("true",), folder=str(folder), snapshots=str(folder / "snapshots"))
    folder.mkdir(mode=0o755)
    write_plan(msgspec.structs.replace(plan, worker=("before",)))
    (folder / "notes.txt").write_text("mine")

    def imported(plan: Launch, checkpoint: Path, step: int, *, strict: bool) -> Imported:
        assert not (folder / RUN_FILE).exists()
        return Imported(f"{checkpoint.name} {step} {strict}", ("b is left out",))

    monkeypatch.setattr(importing, "_imported", imported)
    with pytest.raises(UsageError, match="there is no checkpoint"):
        import_checkpoint(plan, place, overwrite=True)
    place.touch()
    with pytest.raises(UsageError, match="or --overwrite"):
        import_checkpoint(plan, place)
    assert "before" in (folder / RUN_FILE).read_text(), "so far nothing is deleted"
    said = import_checkpoint(plan, place, 4, strict=True, overwrite=True)
    assert said == f"warning: b is left out\nmodel.pt 4 True; go on with `rallypoint resume {folder}`"
    assert "before" not in (folder / RUN_FILE).read_text()
    assert (folder / "notes.txt").exists()


def test_or_resume_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    given = ["--folder", str(tmp_path / "run"), "--or-resume", str(tmp_path), str(tmp_path / "train.py")]
    result = CliRunner().invoke(cli.app, ["import", *given])
    assert isinstance(result.exception, UsageError)
    assert "import has no --or-resume" in str(result.exception)
    assert not (tmp_path / "run").exists()
