import torch
from ray.train import RunConfig, ScalingConfig

from rallypoint.bridges.ray import RallypointTrainer, join


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 4))
    model = torch.nn.Linear(8, 4)
    for micro in join().train(model, data, replicas=4, batch=config["batch"], steps=16):
        with micro:
            micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))


resources, run = ScalingConfig(num_workers=(2, 8)), RunConfig(storage_path="/tmp/results")
print(RallypointTrainer(train, train_loop_config={"batch": 32}, scaling_config=resources, run_config=run).fit().path)
