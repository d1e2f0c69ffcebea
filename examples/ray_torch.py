import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 4))
    model = prepare_model(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=config["batch"])):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


resources, run = ScalingConfig(num_workers=(2, 8)), RunConfig(storage_path="/tmp/results")
print(TorchTrainer(train, train_loop_config={"batch": 32}, scaling_config=resources, run_config=run).fit().path)
