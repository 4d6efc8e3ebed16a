"""Networks that devices train: twenty steps as in PyTorch, and under half of their memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradd.train import Optimizer, artifacts
from helpers import device_models as models
from helpers import device_networks as networks
from helpers.device_networks import Network
from helpers.selection import every_run

ROWS, STEPS, RATE = 4, 20, 0.02
EVERY_RUN = ("GRU", "MobileNetV2")
# What a budget is of the memory that a step takes, where half is less than a plan can do with
BUDGETS = {"U-Net": 0.55, "GRU": 0.9}
# torch.onnx's older exporter has no operator for what its masks are made of
DYNAMO = {"SmolLM2 with LoRA"}


def made(name: str, folder: Path) -> Network:
    """The network, with its artifacts in the folder."""
    torch.manual_seed(0)
    network = networks.MODELS[name]()
    network.module.train()
    proto = network.proto(ROWS, name in DYNAMO)
    trained = [n for n, _ in network.module.named_parameters() if network.trained(n)]
    values = models.names(proto)
    models.generate(
        folder,
        proto,
        requires_grad=[n for n in trained if n in values],
        frozen_params=[n for n in network.module.state_dict() if n in values and n not in trained],
        optimizer=artifacts.OptimType.SGD,
    )
    assert set(trained) <= set(values), "the exporter has folded parameters"
    return network


def train(folder: Path, network: Network, **arguments: object) -> tuple[list, dict, dict]:
    """Losses of the steps, the parameters behind them, and what the module holds."""
    state, module = models.load(folder, **arguments)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for step in range(STEPS):
        losses.append(float(module(*network.batch(step, ROWS))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, {name: p.data for name, p in state.parameters}, module.memory()


def torch_losses(network: Network) -> list[float]:
    """The same steps in PyTorch."""
    trained = [p for n, p in network.module.named_parameters() if network.trained(n)]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    losses = []
    for step in range(STEPS):
        *inputs, labels = (torch.tensor(x) for x in network.batch(step, ROWS))
        loss = torch.nn.functional.cross_entropy(network.module(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", every_run(EVERY_RUN, networks.MODELS))
def test_a_network_trains_as_in_torch_and_with_less_memory(name: str, tmp_path: Path) -> None:
    network = made(name, tmp_path)
    losses, values, held = train(tmp_path, network)
    budget = int(held["arena"] * BUDGETS.get(name, 0.5))
    less = train(tmp_path, network, memory_budget=budget)
    assert less[0] == losses
    for key, value in values.items():
        np.testing.assert_array_equal(less[1][key], value, key)
    assert less[2]["arena"] <= budget
    np.testing.assert_allclose(losses, torch_losses(network), rtol=1e-5)
    assert losses[0] != losses[-1]
