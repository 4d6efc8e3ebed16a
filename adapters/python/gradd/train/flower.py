"""A federation by Flower (package flwr): a client that needs the data alone, and a server's rule.

    from flwr.client import start_client
    from gradd.train.federation import LocalTraining
    from gradd.train.flower import Client

    training = LocalTraining("files", lambda: my_batches)
    start_client(server_address="...", client=Client(training).to_client())

Works within ClientApp and ServerApp as well, which take the same objects.
"""

from __future__ import annotations

import logging
import os
from typing import Any

try:
    from flwr.client import NumPyClient
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.strategy import FedAvg
except ImportError as error:
    raise ImportError("gradd.train.flower needs Flower: pip install flwr") from error

from gradd.train.federation import GlobalWeights, LocalTraining, Update

_log = logging.getLogger("gradd")


class Client(NumPyClient):
    """Trains in each round, and gives its update, not its weights.

    The server's configuration of a round may have "learning_rate", a float.

    Args:
        training: On the client's own data.
    """

    def __init__(self, training: LocalTraining) -> None:
        self.training = training

    def fit(self, parameters: list, config: dict) -> tuple[list, int, dict]:
        """The update of a round, its examples, and {"loss": mean loss}."""
        (weights,) = parameters
        update = self.training.fit(weights, config.get("learning_rate"))
        return [update.values], update.examples, {"loss": update.loss}

    def evaluate(self, parameters: list, config: dict) -> tuple[float, int, dict]:
        """The eval model's loss by the weights of all, and its examples."""
        (weights,) = parameters
        loss, examples = self.training.evaluate(weights)
        return loss, examples, {}


class MeanOfUpdates(FedAvg):
    """Adds the mean of the clients' updates to the weights, and writes a checkpoint each round.

    Updates are summed in the order of the clients' identities, so equal updates give equal bits. An
    update of another size or type, or with numbers that are not finite, is left out, with a
    warning.

    Args:
        weights: Of all.
        checkpoint: Where each round's weights are written; None = nowhere.
        **options: Of Flower's FedAvg; fraction_evaluate=0.0 where clients have no eval model.
    """

    def __init__(
        self, weights: GlobalWeights, checkpoint: str | os.PathLike | None = None, **options: Any
    ) -> None:
        first = ndarrays_to_parameters([weights.values])
        super().__init__(initial_parameters=first, **options)
        self.weights, self.checkpoint = weights, checkpoint

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple[Any, dict]:
        """The weights after a round, and {"loss": mean loss}; None, {} if nothing has changed."""
        if failures and not self.accept_failures:
            return None, {}
        updates = []
        for client, result in sorted(results, key=lambda pair: pair[0].cid):
            try:
                updates.append(self._read(result))
            except ValueError as error:
                _log.warning("round %d: client %s: %s", server_round, client.cid, error)
        if not updates:
            return None, {}
        self.weights.add(updates)
        if self.checkpoint is not None:
            self.weights.save(self.checkpoint)
        examples = sum(update.examples for update in updates)
        loss = sum(update.loss * update.examples for update in updates) / examples
        return ndarrays_to_parameters([self.weights.values]), {"loss": loss}

    def _read(self, result: Any) -> Update:
        arrays = parameters_to_ndarrays(result.parameters)
        if len(arrays) != 1:
            raise ValueError(f"{len(arrays)} arrays, expected one")
        loss = float(result.metrics.get("loss", float("nan")))
        update = Update(arrays[0], result.num_examples, loss)
        self.weights.check(update)
        return update
