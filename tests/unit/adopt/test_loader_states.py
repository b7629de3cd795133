"""Loaders with a state of their own: a resume goes on from the newest that every rank has, and compares what comes again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.unit.adopt.test_data_after_a_restart import Fed
from tests.unit.adopt.test_seen import Augmented, sigchld  # noqa: F401
from ttp.adopt.trainer_state import loader_states
from ttp.adopt.trainer_state.loader_parts import parts
from ttp.adopt.trainer_state.loader_states import LoaderStates, stateful
from ttp.errors import DataMismatch

BATCHES = 9


class Stream:
    """Reads on from where its state says, and counts what it has read."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start
        self.at = self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.tensor([self.start + self.at])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.fixture
def every_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_states, "EVERY", 2)


@pytest.mark.usefixtures("every_second_step")
@pytest.mark.parametrize("saved", [5, 6, BATCHES, BATCHES + 1])
def test_a_resume_reads_on_from_the_newest_state_before_the_place(tmp_path: Path, saved: int) -> None:
    """At least one batch comes again. An epoch's end is not a state of the next one."""
    whole = Fed(tmp_path / "whole", Stream()).train(BATCHES + 4)
    first = Fed(tmp_path / "cut", Stream()).train(saved)
    stream = Stream()
    assert [*first, *Fed(tmp_path / "cut", stream).train(BATCHES + 4)] == whole
    again = {5: 1, 6: 2, BATCHES: 1, BATCHES + 1: 1}[saved]
    assert stream.read == BATCHES + 4 - saved + again


@pytest.mark.usefixtures("every_second_step")
def test_a_state_that_leads_elsewhere_is_noticed(tmp_path: Path) -> None:
    """The stream has changed meanwhile."""
    Fed(tmp_path, Stream()).train(5)
    with pytest.raises(DataMismatch, match="batch 4 of epoch 0 on rank 0"):
        Fed(tmp_path, Stream(start=7.0)).train(6)


def test_every_rank_goes_on_from_its_own_state() -> None:
    """Also where another rank publishes the checkpoint; a job of another size reads from the beginning."""
    first = Stream()
    position = iter(first)
    others: list[Any] = [True, [0, 2, {"at": 40}]]
    states = LoaderStates(1, 2, lambda value: [others.pop(0), value])
    assert states.begin(first, 0, 0, refetch=False) == 0
    next(position), next(position)
    states.take(1, 0, 2)
    kept = json.loads(json.dumps(states.kept))
    for rank, at in ((0, 40), (1, 2)):
        stream, again = Stream(), LoaderStates(rank, 2, list)
        again.give_back(kept)
        assert again.begin(stream, 0, 3, refetch=False) == 2 and stream.at == at
        assert again.begin(Stream(), 1, 3, refetch=False) == 0, "another epoch"
        assert again.begin(Stream(), 0, 2, refetch=False) == 0, "nothing would come again"
    next(position)
    others.append([0, 3, {"at": 41}])
    states.take(100, 0, 3)
    again = LoaderStates(1, 2, list)
    again.give_back(states.kept)
    assert again.begin(Stream(), 0, 3, refetch=False) == 2, "the newest may be of a step that is not committed"
    smaller = LoaderStates(0, 1, list)
    smaller.give_back(kept)
    assert smaller.begin(Stream(), 0, 3, refetch=False) == 0


def test_a_state_that_some_rank_lacks_is_not_kept() -> None:
    """One that JSON does not carry, or that is of another place; without states nothing is exchanged after the first step."""
    stream, calls = Stream(), 0

    def exchange(value: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return [True, value] if isinstance(value, bool) else [[0, 3, {"at": 3}], value]

    states = LoaderStates(1, 2, exchange)
    states.begin(stream, 0, 0, refetch=False)
    states.take(1, 0, 2)
    assert states.kept == () and calls == 2
    stream.at = object()  # type: ignore[assignment]
    states.take(100, 0, 3)
    assert states.kept == () and calls == 3
    none = LoaderStates(0, 1, lambda value: [value])
    none.begin([1], 0, 0, refetch=False)
    none.take(1, 0, 1)
    none._exchange = exchange
    none.take(100, 0, 1)
    assert calls == 3


class Numbers(IterableDataset[torch.Tensor]):
    """A streaming data set with the state that torchdata asks for."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 2 * BATCHES:
            self.at += 1
            yield torch.tensor(float(self.at))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


SAMPLES = TensorDataset(torch.arange(2.0 * BATCHES))


def stream(shuffled: bool = False) -> Any:
    """A streaming data set of the library `datasets`."""
    import datasets  # here: it takes a second, of each collection

    samples = datasets.Dataset.from_dict({"x": list(range(2 * BATCHES))}).to_iterable_dataset(num_shards=3)
    return samples.shuffle(seed=1, buffer_size=5).map(dict) if shuffled else samples


def numbers_of(samples: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([float(each["x"]) for each in samples])


def of_torchdata(samples: Any, **options: Any) -> Any:
    collate = None if isinstance(samples, Numbers | TensorDataset) else numbers_of
    return StatefulDataLoader(samples, batch_size=2, collate_fn=collate, **options)


def of_accelerate(*, seeded: bool = False, generator: torch.Generator | None = None) -> Any:
    """Its wrapper reads one batch ahead, has asked for a state already, and draws the shuffle's seed by itself if there is none."""
    torch.manual_seed(0) if seeded else torch.seed()
    return prepare_data_loader(
        DataLoader(SAMPLES, batch_size=1, shuffle=True, generator=generator),
        num_processes=2, process_index=1, rng_types=[], use_stateful_dataloader=True, use_seedable_sampler=seeded,
    )  # fmt: skip


LOADERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "torchdata, shuffled": (
        lambda: of_torchdata(SAMPLES, shuffle=True, generator=torch.Generator().manual_seed(3)),
        True,
    ),
    "torchdata, a stream": (lambda: of_torchdata(Numbers()), True),
    "accelerate": (of_accelerate, True),
    "accelerate, a generator": (lambda: of_accelerate(generator=torch.Generator().manual_seed(3)), True),
    "accelerate, seedable": (lambda: of_accelerate(seeded=True), True),
    "datasets": (lambda: stream().batch(2).map(lambda rows: {"x": rows["x"]}), True),
    "datasets in torchdata": (lambda: of_torchdata(stream()), True),
    "datasets, shuffled in a buffer": (lambda: of_torchdata(stream(shuffled=True)), False),
    "datasets in torch": (lambda: DataLoader(stream(), batch_size=2, collate_fn=numbers_of), False),
}
"""By name: a loader, and whether a resume goes on from its state. A buffer's content is not part of the state, and torch's loader has none."""


@pytest.mark.usefixtures("every_second_step")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("saved", [4, BATCHES + 5])
@pytest.mark.parametrize("name", LOADERS)
def test_a_librarys_loader_goes_on(tmp_path: Path, name: str, saved: int) -> None:
    """In the middle of its first or second epoch; and the epochs that follow are whole."""
    make, from_state = LOADERS[name]
    length = 3 * BATCHES - 1
    cut = Fed(tmp_path, make())
    first = cut.train(saved)
    again = Fed(tmp_path, make())
    fetches = mock.Mock(wraps=again.guard._seen.batch)
    with mock.patch.object(again.guard._seen, "batch", fetches):
        rest = again.train(length)
    fetched = [(call.args[0], call.args[1]) for call in fetches.mock_calls]
    assert fetched[0] == (saved // BATCHES, (2 if saved == 4 else 3) if from_state else 0) and fetched[
        -BATCHES + 1 :
    ] == [(2, n) for n in range(BATCHES - 1)]
    whole = Fed(tmp_path / "whole", make())
    whole.guard._seeds.base = cut.guard._seeds.base
    assert [*first, *rest] == whole.train(length)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_state_of_a_dispatcher_is_left_out() -> None:
    """Rank 0 reads ahead for all the others, and its state with it."""
    loader = prepare_data_loader(
        DataLoader(SAMPLES, batch_size=1),
        num_processes=2,
        process_index=0,
        dispatch_batches=True,
        put_on_device=True,
        device=torch.device("cpu"),
        use_stateful_dataloader=True,
    )
    assert hasattr(loader, "state_dict") and stateful(loader) is None
    assert stateful(of_accelerate()) is not None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_state_of_a_stream_in_workers_that_stay_is_left_out() -> None:
    """It is in the workers, and cannot be taken away from them at an epoch's begin."""
    for persistent in (False, True):
        loader = of_torchdata(stream(), num_workers=1, persistent_workers=persistent)
        assert (stateful(loader, with_workers=True) is None) == persistent and stateful(loader) is None


@pytest.mark.usefixtures("every_second_step", "sigchld")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_workers_draw_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """No state has it: batches are fetched again."""

    def loader() -> Any:
        return StatefulDataLoader(Augmented(), batch_size=3, num_workers=1)

    whole = Fed(tmp_path / "whole", loader()).train(4)
    first = Fed(tmp_path / "cut", loader()).train(3)
    assert [*first, *Fed(tmp_path / "cut", loader()).train(4)] == whole


@pytest.mark.usefixtures("every_second_step")
def test_a_state_that_leads_elsewhere_can_be_left_out(tmp_path: Path) -> None:
    """The message says how."""

    class Skipping(Stream):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.at = state_dict["at"] + 1

    Fed(tmp_path, Skipping()).train(5)
    again = Fed(tmp_path, Skipping())
    with pytest.raises(DataMismatch, match=r"went on from its own state_dict.*guard\.batches\(loader, refetch=True\)"):
        again.train(6)
    again.guard.close()
    again = Fed(tmp_path, Skipping())
    assert again.train(6, refetch=True) == [[6.0]]


def test_a_state_that_the_manifest_cannot_carry_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large, or of a type that JSON has not."""
    for state in ({"buffer": [0] * 600}, {"at": object()}):
        said: list[str] = []
        monkeypatch.setattr(loader_states, "show", lambda level, line, said=said: said.append(line))
        monkeypatch.setattr(loader_states, "MAX_BYTES", 1000)
        loader = Stream()
        loader.state_dict = lambda state=state: state  # type: ignore[method-assign, misc]
        states = LoaderStates(0, 1, lambda value: [value])
        states.begin(loader, 0, 0, refetch=False)
        states.take(1, 0, 1)
        states.take(100, 0, 2)
        assert len(said) == 1 and "fetches the epoch's batches again from its first" in said[0] and not states.kept


class DistributedSamplerWrapper:
    """As Lightning's: an iterator draws an epoch's order at once."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler


def test_an_order_that_is_drawn_with_each_iterator_is_not_a_state() -> None:
    """torchdata asks for two iterators to load a state. The sampler within is seeded as any."""
    loader: Any = Stream()
    assert stateful(loader) is loader
    generator = torch.Generator()
    wrapped = SimpleNamespace(dataset=SimpleNamespace(_sampler=SimpleNamespace(generator=generator)))
    loader.sampler = DistributedSamplerWrapper(wrapped)
    assert stateful(loader) is None
    assert any(getattr(part, "generator", None) is generator for _, part in parts(loader))
