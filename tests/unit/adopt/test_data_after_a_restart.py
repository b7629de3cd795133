"""What a restart trains on, in one process: the batches and learning rates that the run would have had, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import ttp
from ttp.adopt.trainer_state import feed, seen
from ttp.config import Settings
from ttp.errors import ConfigError, DataMismatch

OFF = Settings(enable=False)
STEPS = 7
SAVED = 4
"""The step that a cut run saves, while it computes the next one."""
DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(11))


class Drawing:
    """A trainer as nanoGPT is: batches by torch.randint, the first before the loop, each next one ahead of the backward pass."""

    def __init__(self, folder: Path, seed: int = 0, early: bool = False, ahead: bool = True, **options: Any) -> None:
        """`early`: the first batch is drawn before ttp.protect. `ahead`: one is drawn before the loop, and each next one in the step before."""
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        drawn = self.batch() if early else None
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[folder], settings=OFF, **options)
        self.ahead = ahead
        self.x: Any = drawn if drawn is not None or not ahead else self.batch()

    def batch(self) -> torch.Tensor:
        return DATA[torch.randint(len(DATA), (5,))]

    def train(self, cut: str = "") -> dict[int, float]:
        """Return the loss of each step. `cut`: save `SAVED` there, and leave."""
        reported = {}
        for step in range(self.guard.step + 1, STEPS + 1):
            if not self.ahead:
                self.x = self.batch()
            if cut == "between" and step == SAVED + 1:
                break
            loss = self.model(self.x).square().mean()
            if self.ahead:
                self.x = self.batch()
            self.optimizer.zero_grad()
            loss.backward()
            if cut == "in the next step" and step == SAVED + 1:
                break
            self.optimizer.step()
            reported[step] = loss.item()
        if cut:
            self.guard.save()
        self.guard.close()
        return reported


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("cut", ["between", "in the next step"])
def test_batches_drawn_from_the_global_generator_go_on(tmp_path: Path, cut: str, ahead: bool) -> None:
    """Whether the next batch is drawn ahead or at the step's begin. Each loss has the bits of the baseline run."""
    whole = Drawing(tmp_path / "whole", ahead=ahead).train()
    first = Drawing(tmp_path / "cut", ahead=ahead).train(cut)
    second = Drawing(tmp_path / "cut", seed=3, ahead=ahead).train()
    assert {**first, **second} == whole and min(second) == SAVED + 1


@pytest.mark.parametrize("options", [{"reseed": False}, {"early": True}])
def test_another_batch_after_a_restart_is_an_error(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without seeds, and for a batch that is drawn before they are set; it may be accepted."""
    Drawing(tmp_path, **options).train("in the next step")
    again = Drawing(tmp_path, **options)
    with pytest.raises(
        DataMismatch, match=r"called with another batch in step 5 on rank 0.*got fingerprint \w+, expected \w+\. Draw"
    ):
        again.train()
    again.guard.close()
    said: list[str] = []
    monkeypatch.setattr(seen, "show", lambda level, line: said.append(line))
    reported = Drawing(tmp_path, **options, on_data_mismatch="warn").train()
    assert list(reported) == list(range(SAVED + 1, STEPS + 1))
    assert len(said) == 1 and "another batch in step 5" in said[0]


def test_data_that_begin_again_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no batch of the next step was seen before the fault, the first one of the run is known."""
    said: list[str] = []
    monkeypatch.setattr(seen, "show", lambda level, line: said.append(line))
    Drawing(tmp_path, early=True).train("between")
    Drawing(tmp_path, early=True).train()
    assert [line for line in said if "in step 5, with the batch of step 1" in line] == said and len(said) == 1


def test_another_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid on_data_mismatch: got 'ignore', expected one of 'error', 'warn'"):
        Drawing(tmp_path, on_data_mismatch="ignore")


def test_an_evaluation_draws_nothing_of_the_training(tmp_path: Path) -> None:
    """Within guard.pause: a restart does not repeat it, and the batch that follows it is the same."""
    trainer = Drawing(tmp_path)
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    with trainer.guard.pause():
        torch.rand(3), random.random(), np.random.rand()
    after = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:]


def test_a_pass_that_is_repeated_in_backward_draws_nothing_of_the_next_batch(tmp_path: Path) -> None:
    """Activation checkpointing of the whole model, generators not preserved: what is drawn behind it is the same after a restart."""

    class Repeating(Drawing):
        def train(self, cut: str = "") -> dict[int, float]:
            reported = {}
            for step in range(self.guard.step + 1, STEPS + 1):
                x = self.batch()
                loss = checkpoint(self.model, x, use_reentrant=False, preserve_rng_state=False).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                reported[step] = loss.item()
                if cut and step == SAVED:
                    break
            if cut:
                self.guard.save()
            self.guard.close()
            return reported

    class Seeded(Repeating):
        """The first batch is the first draw, as it is in the loop."""

        def __init__(self, folder: Path, **options: Any) -> None:
            super().__init__(folder, early=True, **options)

    whole = Seeded(tmp_path / "whole").train()
    first = Seeded(tmp_path / "cut").train("between")
    assert {**first, **Seeded(tmp_path / "cut").train()} == whole


# --- loaders ---


class Numbered(Dataset[torch.Tensor]):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        self.noise = random.Random(5)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.noise.random()])


class Shuffling(torch.utils.data.Sampler[int]):
    """A sampler with numpy's generator."""

    def __init__(self, generator: np.random.Generator | np.random.RandomState) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(12).tolist())

    def __len__(self) -> int:
        return 12


def of_torch(seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=3, shuffle=True, generator=generator)


def of_numpy(generator: np.random.Generator | np.random.RandomState) -> Any:
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=3, sampler=Shuffling(generator))


def of_accelerate() -> Any:
    """Its default: a shuffle by a generator that goes on from epoch to epoch. Not seeded by the trainer."""
    loader = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=3, shuffle=True)
    torch.seed()
    return prepare_data_loader(loader, num_processes=2, process_index=1, rng_types=[])


def of_accelerate_seedable() -> Any:
    """Its other sampler counts the epochs of this process."""
    torch.manual_seed(2)
    loader = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=3, shuffle=True)
    return prepare_data_loader(loader, num_processes=2, process_index=1, rng_types=[], use_seedable_sampler=True)


class Counting:
    """Counts the epochs of its process for a sampler, as Fabric's wrapper of a loader does (the library is not a test dependency)."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._num_iter_calls = 0

    def __iter__(self) -> Iterator[Any]:
        self._dataloader.sampler.set_epoch(self._num_iter_calls)
        self._num_iter_calls += 1
        return iter(self._dataloader)


def of_fabric() -> Counting:
    samples = TensorDataset(torch.arange(12.0))
    return Counting(DataLoader(samples, batch_size=3, sampler=DistributedSampler(samples, num_replicas=1, rank=0)))


class Combined:
    """Several loaders as one, as Lightning's CombinedLoader."""

    def __init__(self, *loaders: Any) -> None:
        self.flattened = list(loaders)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batches in zip(*self.flattened, strict=True):
            yield torch.cat([batch[0] for batch in batches])


LOADERS: dict[str, Callable[[], Any]] = {
    "torch": of_torch,
    "numpy": lambda: of_numpy(np.random.default_rng(7)),
    "numpy, RandomState": lambda: of_numpy(np.random.RandomState(7)),
    "python": lambda: DataLoader(Numbered(), batch_size=3),
    "python, concatenated": lambda: DataLoader(ConcatDataset([Numbered(), Numbered()]), batch_size=6),
    "python, a part of a part": lambda: DataLoader(Subset(Subset(Numbered(), range(12)), range(12)), batch_size=3),
    "accelerate": of_accelerate,
    "accelerate, seedable": of_accelerate_seedable,
    "Fabric": of_fabric,
    "Lightning, combined": lambda: Combined(of_fabric(), of_torch()),
}


class Fed:
    """A trainer that takes its batches from the guard."""

    def __init__(self, folder: Path, loader: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = loader
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[folder], settings=OFF, **options)

    def train(
        self, until: int = 12, seeds: Callable[[Any, int], object] = lambda loader, epoch: None, **options: Any
    ) -> list[list[float]]:
        """Return every batch; save the step `until`. `seeds(loader, epoch)`: before each epoch. `options`: of guard.batches."""
        reported: list[list[float]] = []
        for epoch in self.guard.epochs(3):
            seeds(self.loader, epoch)
            for batch in self.guard.batches(self.loader, **options):
                first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
                values = torch.as_tensor(batch if torch.is_tensor(batch) else first, dtype=torch.float32)
                reported.append(values.view(-1).tolist())
                self.model(values.view(-1, 1)).square().mean().backward()
                self.optimizer.step()
                if self.guard.step == until:
                    self.guard.save()
                    self.guard.close()
                    return reported
        raise AssertionError("too few batches")


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_s_epoch_is_the_same_after_a_restart(tmp_path: Path, name: str) -> None:
    """In the second epoch, whose order hangs on generators of the loader, its sampler or its data; epochs differ."""
    make = LOADERS[name]
    torch.manual_seed(0)
    options = {"on_data_mismatch": "error"}
    first = Fed(tmp_path, make(), **options).train(6)
    again = Fed(tmp_path, make(), **options)
    rest = again.train(10)
    saved_ahead = Fed(tmp_path / "whole", make())
    saved_ahead.guard._seeds.base = again.guard._seeds.base
    whole = saved_ahead.train(10)
    assert [*first, *rest] == whole
    assert sorted(whole[:4]) != sorted(whole[4:8]) or whole[:4] != whole[4:8]


@pytest.mark.parametrize("generator", [random.Random(3), np.random.RandomState(3)], ids=["python", "numpy"])
def test_numbers_that_the_trainer_draws_are_not_taken_for_a_new_seed(generator: Any) -> None:
    """Nor as many as a Mersenne Twister has words: then it stands where it stands when it was seeded."""
    draw: Callable[[], object] = (
        (lambda: generator.getrandbits(32))
        if isinstance(generator, random.Random)
        else (lambda: generator.randint(2**32, dtype=np.uint32))
    )
    seeded = feed._seeding_of(generator)
    assert seeded is not None and not feed._is_seeded_anew(generator, seeded)
    for _ in range(3 * 624):
        draw()
        assert not feed._is_seeded_anew(generator, seeded)
    for number in (3, 4):
        generator.seed(number)
        assert feed._is_seeded_anew(generator, seeded) == (number != 3)


def reassign(generator: np.random.Generator, epoch: int) -> None:
    generator.bit_generator.state = np.random.PCG64(epoch).state


SEEDS: dict[str, Callable[[Any, int], object]] = {
    "torch": lambda loader, epoch: loader.generator.manual_seed(epoch),
    "numpy": lambda loader, epoch: reassign(loader.sampler.generator, epoch),
    "numpy, RandomState": lambda loader, epoch: loader.sampler.generator.seed(epoch),
    "python": lambda loader, epoch: loader.dataset.noise.seed(epoch),
}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("stopped", [4, 6])
@pytest.mark.parametrize("name", SEEDS)
def test_generators_that_the_trainer_seeds_in_each_epoch_lead_to_the_same_batches_after_a_restart(
    tmp_path: Path, name: str, stopped: int, constant: bool
) -> None:
    """With the epoch's number, as a sampler's `set_epoch` may do it, or with one and the same. At an epoch's end no batch is there to compare."""

    def seeds(loader: Any, epoch: int) -> object:
        return SEEDS[name](loader, 5 if constant else epoch)

    options = {"on_data_mismatch": "error"}
    first = Fed(tmp_path, LOADERS[name](), **options).train(stopped, seeds)
    again = Fed(tmp_path, LOADERS[name](), **options)
    rest = again.train(10, seeds)
    in_one_go = Fed(tmp_path / "whole", LOADERS[name]())
    in_one_go.guard._seeds.base = again.guard._seeds.base
    whole = in_one_go.train(10, seeds)
    assert [*first, *rest] == whole
    assert whole[:4] != whole[4:8]


@pytest.mark.parametrize(
    "make", [lambda seed: of_torch(seed), lambda seed: of_numpy(np.random.RandomState(seed))], ids=["torch", "numpy"]
)
def test_generators_that_differ_between_ranks_stay_different(tmp_path: Path, make: Callable[[int], Any]) -> None:
    """What the trainer has seeded them with is a part of their seed."""
    batches = [Fed(tmp_path / str(seed), make(seed)).train(4) for seed in (1, 2)]
    assert batches[0] != batches[1]


class Unsteady:
    """Another order in every attempt."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.first), self.first + 6.0).view(6, 1))


@pytest.mark.parametrize("on_data_mismatch", ["error", "warn"])
def test_a_loader_that_gives_other_batches_is_noticed_at_the_first_one_that_is_skipped(
    tmp_path: Path, on_data_mismatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained on."""
    said: list[str] = []
    monkeypatch.setattr(seen, "show", lambda level, line: said.append(line))
    Fed(tmp_path, Unsteady(0)).train(3)
    again = Fed(tmp_path, Unsteady(1), on_data_mismatch=on_data_mismatch)
    if on_data_mismatch == "error":
        with pytest.raises(DataMismatch, match="batch 0 of epoch 0 on rank 0 is not the one"):
            again.train(5)
        assert again.guard.step == 3
    else:
        assert len(again.train(5)) == 2
        assert len(said) == 3, "one for each batch of the record"


# --- schedules ---


@pytest.mark.parametrize("per_update", [1, 3])
@pytest.mark.parametrize("chained", [False, True])
def test_a_schedule_goes_on_however_often_it_steps_for_an_update(
    tmp_path: Path, per_update: int, chained: bool
) -> None:
    """As accelerate's does, once for each process."""

    def train(folder: Path, until: int) -> dict[int, float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if chained:
            scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler])
        guard = ttp.protect(model, optimizer, schedulers=[scheduler], save_dirs=[folder], settings=OFF)
        reported = {}
        for step in range(guard.step + 1, until + 1):
            model(torch.ones(1, 2) / step).sum().backward()
            reported[step] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if step == until:
                guard.save()  # before the scheduler's step, as a dying gasp would
            for _ in range(per_update):
                scheduler.step()
        guard.close()
        return reported

    whole = train(tmp_path / "whole", 9)
    rest = [train(tmp_path / "cut", until) for until in (3, 4, 9)]
    assert {step: rate for reported in rest for step, rate in reported.items()} == whole


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch advises against it, and goes on
@pytest.mark.parametrize("place", ["loop's begin", "behind each of three passes", "in front of the update"])
@pytest.mark.parametrize("cut", [(1, 2, 9), (3, 4, 9), (5, 9)])
def test_a_schedule_goes_on_wherever_in_the_loop_it_steps(tmp_path: Path, place: str, cut: tuple[int, ...]) -> None:
    """What the trainer calls again by itself is not repeated for it. Saved behind the update, before what follows it."""

    def train(folder: Path, until: int) -> dict[int, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        guard = ttp.protect(model, optimizer, schedulers=[scheduler], save_dirs=[folder], settings=OFF)
        reported: dict[int, list[float]] = {}
        for step in range(guard.step + 1, until + 1):
            if place == "loop's begin":
                scheduler.step()
            for number in range(3):
                reported.setdefault(step, []).append(optimizer.param_groups[0]["lr"])
                model(torch.ones(1, 2) / step).sum().backward()
                if number == 2:
                    if place == "in front of the update":
                        scheduler.step()
                    optimizer.step()
                    if step == until:
                        guard.save()
                if place == "behind each of three passes":
                    scheduler.step()
        guard.close()
        return reported

    whole = train(tmp_path / "whole", 9)
    rest = [train(tmp_path / "cut", until) for until in cut]
    assert {step: rates for reported in rest for step, rates in reported.items()} == whole


def test_another_learning_rate_after_a_restart_is_an_error(tmp_path: Path) -> None:
    """A scheduler that ttp.protect was not given."""

    def make() -> tuple[Any, Any, Any, ttp.Guard]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return model, optimizer, scheduler, ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF)

    model, optimizer, scheduler, guard = make()
    for step in (1, 2):
        model(torch.ones(1, 2) / step).sum().backward()
        optimizer.step()
        scheduler.step()
    model(torch.ones(1, 2) / 3)
    guard.save()
    guard.close()
    model, *_, guard = make()
    with pytest.raises(DataMismatch, match=r"param group 0 in step 3 .*: got 0\.5, expected 0\.25\. Give ttp\.protect"):
        model(torch.ones(1, 2) / 3)
