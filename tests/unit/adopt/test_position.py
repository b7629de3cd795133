"""The place in an epoch, given back to another number of ranks: no sample is left out or trained on twice without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.unit.adopt.test_data_after_a_restart import Fed
from tests.unit.adopt.test_guard import Unwatched
from ttp.adopt import protect
from ttp.adopt.trainer_state import position as position_module
from ttp.adopt.trainer_state import seen
from ttp.adopt.trainer_state.loader_parts import length, samples_in_batch
from ttp.adopt.trainer_state.position import DataPosition, check_position
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.errors import DataMismatch, NotAsBefore

SAMPLES = 64


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (seen, position_module):
        monkeypatch.setattr(module, "show", lambda level, line: lines.append(line))
    return lines


def by_torch(world: int, rank: int, size: int = 2, samples: int = SAMPLES) -> DataLoader[Any]:
    data = range(samples)
    sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(list(data), batch_size=size, sampler=sampler)  # type: ignore[arg-type]


def by_accelerate(world: int, rank: int, split: bool = False) -> Any:
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=8 if split else 2)
    return prepare_data_loader(
        loader, num_processes=world, process_index=rank, split_batches=split, rng_types=[], put_on_device=False
    )


def at(rank: int, world: int, mismatch: str = "error") -> DataPosition:
    return DataPosition(Unwatched(), SeenBatches(rank, world, mismatch))


def trained(
    make: Any, world: int, state: dict[str, Any] | None, steps: int | None = None, mismatch: str = "error"
) -> Any:
    """Return the samples that a job of `world` ranks trains on in `steps` steps (None: to the epoch's end) and where it is then."""
    samples: list[int] = []
    for rank in range(world):
        place = at(rank, world, mismatch)
        if state is not None:
            place.load_state_dict(state)
        taken = place.state_dict()
        for done, (_, batch) in enumerate(place.batches(make(world, rank)), 1):
            samples += (batch if torch.is_tensor(batch) else batch[0]).tolist()
            taken = place.state_dict()
            if done == steps:
                break
    return samples, taken


@pytest.mark.parametrize("make", [by_torch, by_accelerate, lambda world, rank: by_accelerate(world, rank, split=True)])
@pytest.mark.parametrize(("before", "after", "steps"), [(2, 4, 4), (4, 2, 4), (4, 4, 3), (2, 4, 16)])
def test_another_number_of_ranks_trains_on_the_rest_of_the_epoch(
    make: Any, before: int, after: int, steps: int, said: list[str]
) -> None:
    """Each sample once. Rank 0 reports what it skips, unless the epoch was over."""
    first, state = trained(make, before, None, steps)
    rest, _ = trained(make, after, state)
    assert Counter([*first, *rest]) == Counter(range(SAMPLES))
    skipped = state["batch"] * state["samples"] // samples_in_batch(make(after, 0))
    expected = [] if before == after or len(first) == SAMPLES else [
        f"epoch 0 was interrupted after {steps} batches on each of {before} ranks, and goes on with {after}. Skipping {skipped} batches on"
        f" each rank, of {len(first)} samples that were trained on"
    ]  # fmt: skip
    assert said == expected


def test_a_job_that_changes_twice_reckons_from_its_newest_number_of_ranks() -> None:
    """Also where a fault comes before the first step: the place is still that of the job before."""
    first, state = trained(by_torch, 2, None, 4)
    place = at(0, 8)
    place.load_state_dict(state)
    assert place.state_dict() == state and list(place.epochs(1)) == [0]
    place.load_state_dict(state)
    second, state = trained(by_torch, 4, state, 2)
    assert state["ranks"] == 4 and state["batch"] == 4
    rest, _ = trained(by_torch, 1, state)
    assert Counter([*first, *second, *rest]) == Counter(range(SAMPLES))


def test_samples_that_are_not_whole_batches_are_trained_on_again_and_rank_0_warns(said: list[str]) -> None:
    """Fewer than all ranks take at once: no reason to end a job that has lost a node."""
    first, state = trained(by_torch, 2, None, 5)
    rest, _ = trained(by_torch, 4, state)
    counts = Counter([*first, *rest])
    assert sum(count == 2 for count in counts.values()) == 4 and sorted(counts) == list(range(SAMPLES))
    assert said == [
        "epoch 0 was interrupted after 5 batches on each of 2 ranks, and goes on with 4. Skipping 2 batches on each rank, of 20 samples that were trained"
        " on. 4 of them are trained on again, fewer than all ranks take at once"
    ]


def test_a_place_that_is_not_certain_is_an_error_or_a_warning_of_rank_0(said: list[str]) -> None:
    """A loader of the trainer's own: as many batches of each rank are skipped as before. At an epoch's begin there is nothing to skip."""

    def own(world: int, rank: int) -> Iterator[torch.Tensor]:
        return iter(torch.arange(SAMPLES).view(-1, 2)[rank::world])

    _, state = trained(own, 2, None, 4)
    with pytest.raises(
        DataMismatch, match=r"goes on with 4: got a loader of which .*Skipping 4 batches.*resume with 2 ranks; or"
    ):
        trained(own, 4, state)
    rest, _ = trained(own, 4, state, mismatch="warn")
    assert len(rest) == SAMPLES - 4 * 4 * 2 and len(said) == 1
    with pytest.raises(DataMismatch):
        trained(by_torch, 4, state), "that of before is not known"
    _, state = trained(by_torch, 2, None, 4)
    with pytest.raises(DataMismatch):
        trained(own, 4, state)
    assert len(trained(own, 4, {**state, "batch": 0})[0]) == SAMPLES


def test_an_epoch_that_was_over_is_over_on_any_number_of_ranks(said: list[str]) -> None:
    """Also where the samples are not known, and where each rank's last batch is filled up."""

    def uneven(world: int, rank: int) -> Any:
        return by_torch(world, rank, samples=50)

    _, state = trained(uneven, 4, None)
    assert state["batch"] == state["length"] == 7
    assert trained(uneven, 3, state)[0] == []
    assert trained(uneven, 3, {**state, "samples": 0})[0] == [] and not said
    place = at(0, 3)
    place.load_state_dict(state)
    assert [(epoch, len(list(place.batches(uneven(3, 0))))) for epoch in place.epochs(2)] == [(0, 0), (1, 9)]


def test_a_checkpoint_of_before_goes_on_as_it_did() -> None:
    """It has no number of ranks."""
    old = {"epoch": 0, "batch": 4}
    check_position(old, "position")
    assert len(trained(by_torch, 4, old)[0]) == SAMPLES - 4 * 4 * 2


def test_a_loader_that_ends_before_the_place_is_an_error_or_a_warning_of_rank_0(said: list[str]) -> None:
    """It would end the epoch as if it were trained. In place, a restart may find the rest."""
    state = {"epoch": 0, "batch": 5, "ranks": 2, "samples": 0, "length": 0}
    for rank in (1, 0):
        place = at(rank, 2)
        place.load_state_dict(state)
        with pytest.raises(
            DataMismatch,
            match=r"ended before batch 3 of epoch 0, of which 5 batches were trained on before the restart",
        ):
            list(place.batches("abc"))
        warned = at(rank, 2, "warn")
        warned.load_state_dict(state)
        assert [list(warned.batches("abc")) for _ in warned.epochs(1)] == [[]] and len(said) == (rank == 0)
    place._seen.recovered = True
    with pytest.raises(NotAsBefore, match="before the recovery in place"):
        list(place.batches("abc"))
    place.load_state_dict({**state, "batch": 3})
    assert list(place.batches("abc")) == [], "all were trained on"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_samples_of_a_batch_are_known_of_classes_that_divide_an_epoch_from_its_beginning() -> None:
    class Own(DistributedSampler[Any]):
        """May divide it into parts that follow one another."""

    class OwnBatches(BatchSampler):
        """May make batches of several sizes."""

        def __len__(self) -> int:
            raise NotImplementedError

    data, split = list(range(12)), {"num_replicas": 3, "rank": 0}
    torchs, own = DistributedSampler(data, **split), Own(data, **split)  # type: ignore[arg-type, var-annotated]
    of_torchdata = StatefulDistributedSampler(data, **split)
    known = [DataLoader(data, 2, sampler=torchs), StatefulDataLoader(data, 2, sampler=of_torchdata)]  # type: ignore[arg-type]
    assert [samples_in_batch(loader) for loader in known] == [6, 6] and length(known[0]) == 2
    twice = prepare_data_loader(known[0], num_processes=2, process_index=0, rng_types=[], put_on_device=False)
    unknown = [
        DataLoader(data, 2, sampler=own),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=OwnBatches(torchs, 2, False)),  # type: ignore[arg-type]
        DataLoader(data, 2),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=torchs),  # type: ignore[arg-type]
        DataLoader(data, None, sampler=torchs),  # type: ignore[arg-type]
        twice,
        "abc",
    ]
    assert [samples_in_batch(loader) for loader in unknown] == [0] * 7
    assert length("abc") == length(unknown[1]) == length(DataLoader(data, 2, sampler=iter(data))) == 0  # type: ignore[arg-type]


def test_what_one_rank_alone_may_see_every_rank_warns_of(said: list[str]) -> None:
    SeenBatches(1, 2, "warn").differs("another batch")
    assert said == ["another batch"]


def test_the_place_of_a_loop_that_counts_itself_is_not_changed() -> None:
    """Lightning's would end the epoch by its own count; how long the epoch is, is known."""

    class Batches:
        counts_itself = True
        _dataloader = by_torch(2, 0)

    assert samples_in_batch(Batches()) == 0 and length(Batches()) == 16
    assert samples_in_batch(Batches._dataloader) == 4


def test_lightning_s_batches_are_counted_by_its_loop() -> None:
    callback = pytest.importorskip("ttp.adopt.lightning_callback", exc_type=ImportError)
    assert callback._Batches.counts_itself


def test_a_trainer_of_another_size_is_stopped(tmp_path: Path) -> None:
    """Its checkpoint has the number of ranks."""
    batches = torch.arange(12.0).view(4, 3)
    first = Fed(tmp_path, batches)
    first.guard._seen.world_size = 2
    first.train(2)
    with pytest.raises(DataMismatch, match="interrupted after 2 batches on each of 2 ranks, and goes on with 1: "):
        Fed(tmp_path, batches).train(3)


@pytest.mark.parametrize("name", ["epoch", "batch", "ranks", "samples", "length"])
def test_a_damaged_place_is_named(name: str) -> None:
    state = {"schedulers": [], "objects": {}, "seed": 1, "position": {**at(0, 1).state_dict(), name: "2"}}
    with pytest.raises(ValueError, match=rf"position\.{name}: "):
        check_position(state["position"], "position")
    with pytest.raises(ValueError):
        protect._check_state(state)
