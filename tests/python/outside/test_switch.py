"""GRADD_FUSE=0 in a trainer: its models run every operator as it is, in the daemon of everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conftest
import pytest
from nets import Net, assert_close, assert_same_grads, batch, loss_of

from gradd import ORTModule


def trained(monkeypatch: pytest.MonkeyPatch, fuse: str) -> tuple[ORTModule, Net, Any]:
    """A model after one step, and its loss; what comes later runs without the variable."""
    monkeypatch.setenv("GRADD_FUSE", fuse)
    net = Net()
    wrapped = ORTModule(net, strict=True)
    loss = loss_of(wrapped(*batch()))
    loss.backward()
    monkeypatch.delenv("GRADD_FUSE")
    return wrapped, net, loss


@pytest.mark.quick
@pytest.mark.parametrize("order", [("1", "0"), ("0", "1")])
def test_two_models_of_one_trainer(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    models = {fuse: trained(monkeypatch, fuse) for fuse in order}
    fast, plain = (models[fuse][0].gradd_explain().counts() for fuse in "10")
    assert fast["Linear"] == 2 and fast["CrossEntropy"] == 1
    assert not {"Linear", "CrossEntropy"} & set(plain), plain
    assert plain["Gemm"] == 2
    assert_close(models["1"][2], models["0"][2])
    assert_same_grads(models["1"][1], models["0"][1])


def test_a_model_stays_what_it_was(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes are other plans: they follow the model, not the variable."""
    wrapped = trained(monkeypatch, "off")[0]
    loss_of(wrapped(*batch(9))).backward()
    assert wrapped.gradd_explain().counts()["Gemm"] == 2


def test_the_daemon_that_a_trainer_starts_recognises(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.kill()
    assert "Gemm" in trained(monkeypatch, "0")[0].gradd_explain().counts()
    environment = Path(f"/proc/{daemon.pid()}/environ").read_bytes()
    assert b"GRADD_FUSE" not in environment and b"GRADD_DIR" in environment
    assert "Linear" in trained(monkeypatch, "1")[0].gradd_explain().counts()


def test_an_unreadable_value_is_named(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="GRADD_FUSE='maybe': expected one of 1, 0, true"):
        trained(monkeypatch, "maybe")


def test_a_daemon_may_be_told_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_FUSE", "0")
    with conftest._serving(monkeypatch, lambda: True):
        assert trained(monkeypatch, "1")[0].gradd_explain().counts()["Gemm"] == 2
