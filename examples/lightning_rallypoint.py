"""A small Lightning module on random data."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from rallypoint.bridges.lightning import RallypointStrategy


class Net(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.randn(40, 4))
train, held_out = torch.utils.data.DataLoader(data, batch_size=2), torch.utils.data.DataLoader(data, batch_size=8)
model, callbacks = Net(), [ModelCheckpoint("checkpoints", monitor="val_loss"), EarlyStopping("val_loss")]
trainer = lightning.Trainer(strategy=RallypointStrategy(), max_epochs=2, callbacks=callbacks, logger=False)
trainer.fit(model, train, held_out)
