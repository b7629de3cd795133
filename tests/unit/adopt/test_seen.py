"""What is compared after a restart, and what is not: fingerprints of batches, and whose record counts. The global generators are seeded, all of them."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.unit.adopt.test_data_after_a_restart import Fed
from ttp.adopt.trainer_state.fingerprint import SAMPLED_LEAVES, Fingerprint
from ttp.adopt.trainer_state.seeds import Seeds
from ttp.adopt.trainer_state.seen import KEPT, SeenBatches
from ttp.errors import DataMismatch, NotAsBefore


def record(rank: int = 0, world_size: int = 2, batches: int = 20) -> dict[str, Any]:
    """Return the record of a rank that had `batches` batches of epoch 3, and has begun as many steps."""
    seen = SeenBatches(rank, world_size, "error")
    for index in range(batches):
        seen.batch(3, index, torch.tensor([index]))
        seen.forward(index + 1, (torch.tensor([index]),), [0.5], counted=False)
    return seen.record()


def resumed(rank: int = 0, world_size: int = 2, **of: int) -> SeenBatches:
    seen = SeenBatches(rank, world_size, "error")
    seen.expect(record(**of))
    return seen


def test_a_record_has_the_epochs_first_batch_and_the_newest_eight() -> None:
    """However many there were: it is a part of the manifest."""
    rows = record()["batches"]
    assert [row[:2] for row in rows] == [[3, 0], *([3, index] for index in range(20 - KEPT, 20))]
    assert [row[0] for row in record()["passes"]] == list(range(21 - KEPT, 21))


@pytest.mark.parametrize("index", [0, 20 - KEPT, 19])
def test_each_batch_of_the_record_is_compared(index: int) -> None:
    with pytest.raises(DataMismatch, match=rf"batch {index} of epoch 3 on rank 0 is not the one"):
        resumed().batch(3, index, torch.tensor([99]))


@pytest.mark.parametrize(("recovered", "event"), [(False, "the restart"), (True, "the recovery in place")])
def test_a_warning_says_what_the_data_differ_from(
    recovered: bool, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that has entered its training again was not restarted."""
    seen = SeenBatches(0, 2, "warn")
    seen.expect({**record(), "first": ""})
    seen.recovered = recovered
    with caplog.at_level(logging.WARNING, "ttp"):
        seen.batch(3, 19, torch.tensor([99]))
        seen.forward(20, (torch.tensor([99]),), [0.25], counted=False)
        again = SeenBatches(0, 2, "warn")
        again.expect({**record(), "passes": [[20, "", [0.5]]], "first": Fingerprint((torch.tensor([0]),)).value()})
        again.recovered = recovered
        again.forward(20, (torch.tensor([0]),), [0.5], counted=False)
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 4 and all(f"before {event}: got" in line for line in said[:3]), said
    assert f"begins after {event}, in step 20, with the batch of step 1" in said[3]


def test_what_differs_in_a_recovery_in_place_is_not_in_the_record_that_a_restart_gets() -> None:
    """The process ends for it, and a new one goes on from what was there."""

    def other_batch(seen: SeenBatches) -> None:
        seen.batch(3, 19, torch.tensor([99]))

    def other_rate(seen: SeenBatches) -> None:
        seen.forward(20, (torch.tensor([99]),), [0.25], counted=False)

    for differs in (other_batch, other_rate):
        seen = resumed()
        seen.recovered = True
        before = seen.record()
        with pytest.raises(NotAsBefore):
            differs(seen)
        assert seen.record() == before


def test_batches_are_those_of_one_rank_and_one_size_of_job() -> None:
    """Other ranks have other ones; learning rates are the same on all ranks."""
    for other in (resumed(rank=1), resumed(world_size=4), resumed(rank=1, world_size=4)):
        other.batch(3, 0, torch.tensor([99]))
        other.forward(20, (torch.tensor([99]),), [0.5], counted=False)
    with pytest.raises(DataMismatch, match="learning rate of param group 0 in step 20"):
        resumed(rank=1).forward(20, (torch.tensor([99]),), [0.25], counted=False)
    resumed(world_size=4).forward(20, (torch.tensor([99]),), [0.25], counted=False)
    with pytest.raises(DataMismatch, match="the model was called with another batch in step 20 on rank 0"):
        resumed().forward(20, (torch.tensor([99]),), [0.5], counted=False)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: tuple[str, ...]


X = torch.arange(1000.0)
ALIKE = [X, X.numpy(), {"x": X, "n": 3}, [X, "name"], Batch(X, ("a", "b")), "text", b"bytes", 3, 2.5]


@pytest.mark.parametrize(("place", "sampled"), [(0, True), (3, True), (4, False), (501, True), (999, True)])
def test_a_fingerprint_sees_a_change_of_a_sampled_element(place: int, sampled: bool) -> None:
    """256 at equal distances, the first and the last among them."""
    other = X.clone()
    other[place] += 1
    assert (Fingerprint(other).value() != Fingerprint(X).value()) == sampled


def test_batches_of_another_shape_type_or_content_have_other_fingerprints() -> None:
    """And equal ones equal ones, whatever they are made of."""
    different: list[Any] = [
        *ALIKE, X.view(10, 100), X.view(100, 10), X.double(), X.int(), X[:999], X.flip(0), {"x": X, "n": 4}, [X, "other"],
        Batch(X, ("a", "c")), Batch(X + 1, ("a", "b")), "texts", 4, 2.25, True, X.bool(), X.numpy().reshape(10, 100),
    ]  # fmt: skip
    values = [Fingerprint(each).value() for each in different]
    assert len(set(values)) == len(values) and all(values)
    assert [Fingerprint(each).value() for each in different] == values
    assert Fingerprint([0] * SAMPLED_LEAVES + [1]).value() == Fingerprint([0] * SAMPLED_LEAVES + [2]).value()
    assert Fingerprint(object()).value() == Fingerprint([]).value() == ""


def test_a_fingerprint_is_of_the_batch_as_it_was() -> None:
    """A trainer may change it in place."""
    batch = X.clone()
    found = Fingerprint(batch)
    batch.zero_()
    assert found.value() == Fingerprint(X).value()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_batches_of_types_that_torch_cannot_index_have_fingerprints(dtype: torch.dtype) -> None:
    """Tokens are often kept in 16 bits."""
    ones, numbers = torch.ones(600).to(dtype), (torch.arange(600) % 7).float().to(dtype)
    assert Fingerprint(ones).value() == Fingerprint(ones.clone()).value() != Fingerprint(numbers).value()
    assert Fingerprint(numbers.view(20, 30).t()).value() == Fingerprint(numbers.view(20, 30).t().contiguous()).value()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_has_a_fingerprint(layout: torch.layout) -> None:
    """Of its type alone."""
    assert Fingerprint(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)).value()


def test_two_threads_that_ask_at_once_get_the_same_fingerprint() -> None:
    """The training thread compares a batch while another one writes the record of it."""

    class Asked:
        """A copy whose end the other thread sees first."""

        def synchronize(self) -> None:
            found._copied = []
            other.append(found.value())

    found, other = Fingerprint(X), list[str]()
    found._copied = [Asked()]
    assert [found.value(), *other, found.value()] == [Fingerprint(X).value()] * 3


# --- global generators ---


def draws(seeds: Seeds) -> list[float]:
    seeds.seed_pass(3, 0)
    return [torch.rand(()).item(), random.random(), np.random.random()]


def test_every_rank_draws_for_itself_and_the_same_in_each_attempt() -> None:
    """From torch's, Python's and numpy's generators."""
    torch.manual_seed(0)
    first = Seeds(torch.device("cpu"), enabled=True)
    torch.manual_seed(0)
    again, other = Seeds(torch.device("cpu"), enabled=True), Seeds(torch.device("cpu"), enabled=True)
    other._rank = 1
    assert draws(first) == draws(again)
    assert not set(draws(first)) & set(draws(other))


def test_each_device_is_seeded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the rank sees: the current device need not be the model's. The devices are replaced by a record of the calls."""
    module = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    seeds = Seeds(torch.device("cpu"), enabled=True)
    seeds._device = torch.device("cuda", 1)
    seeds.seed_fetch(2, 5)
    assert module.mock_calls == [mock.call.manual_seed_all(seeds.number(0, "fetch", 2, 5))]
    module.reset_mock()
    with seeds.kept():
        pass
    states = module.get_rng_state_all.return_value
    assert module.mock_calls == [mock.call.get_rng_state_all(), mock.call.set_rng_state_all(states)]


# --- augmentations ---


class Augmented(Dataset[torch.Tensor]):
    """Draws from each library's global generator; `own`: from one of its own, seeded by the system."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = np.random.default_rng().random() if self.own else np.random.random()
        return torch.tensor([index, torch.rand(()).item(), random.random(), noise])


@pytest.fixture
def sigchld() -> Iterator[None]:
    """A loader with workers sets a handler for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("sigchld")
@pytest.mark.parametrize("workers", [0, 1])
def test_augmentations_from_the_global_generators_are_the_same_after_a_restart(tmp_path: Path, workers: int) -> None:
    """Python's, numpy's and torch's, in the process and in workers, in the second epoch."""

    def loader() -> Any:
        return DataLoader(Augmented(), batch_size=3, num_workers=workers)

    whole = Fed(tmp_path / "whole", loader()).train(9)
    first = Fed(tmp_path / "cut", loader()).train(6)
    random.seed(1), np.random.seed(1), torch.seed()
    assert [*first, *Fed(tmp_path / "cut", loader()).train(9)] == whole
    drawn = [tuple(batch[at::4]) for batch in whole for at in (1, 2, 3)]
    assert len(set(drawn)) == len(drawn), "other noise in each batch"


def test_augmentations_that_differ_by_intention_get_a_message_that_says_what_to_do(tmp_path: Path) -> None:
    """And are accepted with the argument that it names."""
    Fed(tmp_path, DataLoader(Augmented(own=True), batch_size=3)).train(2)
    again = Fed(tmp_path, DataLoader(Augmented(own=True), batch_size=3))
    with pytest.raises(DataMismatch) as error:
        again.train(4)
    again.guard.close()
    assert "draw augmentations from torch's, numpy's or Python's generator" in str(error.value)
    assert str(error.value).endswith("or continue with other data by on_data_mismatch='warn'")
    assert len(Fed(tmp_path, DataLoader(Augmented(own=True), batch_size=3), on_data_mismatch="warn").train(4)) == 2
