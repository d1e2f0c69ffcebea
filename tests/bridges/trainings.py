"""The same small trainings with Lightning and with Hugging Face's Trainer, plain and with Rallypoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from rallypoint.worker.tensors import weights_hash

SAMPLES, BATCH, EPOCHS = 40, 2, 2
STRIKE_AT = 13  # steps: in the middle of the second epoch of two replicas


def strike(home: str, step: int, replica: int) -> None:
    """Replica 1 kills its process, once."""
    mark = Path(home) / "struck"
    if home and step == STRIKE_AT and replica == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def lightning_module(home: str = "") -> Any:
    """Two layers, AdamW with a schedule."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
            self.val_losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def on_train_batch_end(self, *_: Any) -> None:
            strike(home, self.trainer.global_step, self.trainer.global_rank)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net()


def fit_lightning(
    job: Any, folder: str, accumulate: int = 1, patience: int = 9, **more: Any
) -> tuple[str, int, list[str]]:
    """Returns the weights' hash, the step, and the checkpoints in the folder. Without a `job`: plain Lightning.

    No checkpoints but on replica 0, which saves: the others do not wait for it.
    """
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    if job is not None:
        from rallypoint.bridges.lightning import RallypointStrategy

        strategy = RallypointStrategy("cpu")
        strategy._job = job
        more["strategy"] = strategy
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 4, generator=generator)
    )
    model = lightning_module()
    min_delta = 0.0 if patience > 1 else 100.0
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, accumulate_grad_batches=accumulate, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[
            ModelCheckpoint(folder, monitor="val_loss", filename="{step}"),
            EarlyStopping("val_loss", patience=patience, min_delta=min_delta),
        ], **more,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=8))
    saved = sorted(path.name for path in Path(folder).iterdir()) if trainer.is_global_zero else []
    return weights_hash(model.net), trainer.global_step, saved


def train_huggingface(
    job: Any, folder: str, accumulate: int = 1, clip: float = 0.0, **more: Any
) -> tuple[list[float], int, list[str]]:
    """Returns the sums of the parameters, the step, and what is in the folder. Without a `job`: plain transformers."""
    import tqdm
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tqdm.tqdm.monitor_interval = 0  # no thread that outlives the test

    kind: Any = Trainer
    if job is not None:
        from rallypoint.bridges.huggingface import RallypointTrainer

        kind = RallypointTrainer
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    rows = torch.randint(0, 64, (SAMPLES, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulate, num_train_epochs=EPOCHS,
        learning_rate=0.01, warmup_steps=3, max_grad_norm=clip, train_sampling_strategy="sequential",
        eval_strategy="epoch", save_strategy="epoch", logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=data[:8], **more)
    if job is not None:
        trainer._joined = job
    trainer.train()
    trainer.save_model(f"{folder}/model")
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    return sums, trainer.state.global_step, sorted(path.name for path in Path(folder).iterdir())
