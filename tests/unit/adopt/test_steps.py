"""One rank's adopted optimizer under a real gate: updates that raise, a step that another thread finishes, and odd calls."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import ttp
from tests.gates import freeze, thaw
from ttp.adopt import optimizer as module
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.errors import ConfigError, ProtocolError
from ttp.optim.step_agreement import spanning
from ttp.optim.step_agreement.participation import NUMBERS, Contribution
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, Phase, StateReport

LONG_S = 60.0


class Watched(SGD):
    """Says which thread updates; raises or stops in the middle when ordered to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.threads: list[int] = []
        self.fails = False
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.threads.append(threading.get_ident())
        self.entered.set()
        assert self.goes_on.wait(LONG_S)
        if self.fails:
            raise ZeroDivisionError("the optimizer's own mistake")
        super().step(closure)


def adopt(optimizer_of: Callable[[Any], Any] = Watched, **options: Any) -> tuple[Any, AdoptedOptimizer, Gate]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    adopted = AdoptedOptimizer(model, optimizer_of(model.parameters()), **options)
    gate = Gate(0)
    adopted.attach(gate)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, adopted, gate


def frozen(gate: Gate) -> StateReport:
    """Freeze as a processor does: on another thread, since the lock is the training thread's own during an update."""
    reports: list[StateReport] = []
    thread = threading.Thread(target=lambda: reports.append(freeze(gate, 1, 2.0)))
    thread.start()
    thread.join()
    return reports[0]


def other_ranks(monkeypatch: pytest.MonkeyPatch, world: int, step: int, all_reduce: Any = None) -> None:
    """Let all others be at `step`. Optimizers that are made afterwards have `world` ranks."""

    def reduce(vector: torch.Tensor, group: Any) -> None:
        vector[:NUMBERS] += (world - 1) * torch.tensor(Contribution(0, step).numbers, dtype=torch.float64)

    fake = SimpleNamespace(get_world_size=lambda group: world, all_reduce=all_reduce or reduce)
    monkeypatch.setattr(spanning, "dist", fake)
    monkeypatch.setattr(module, "_world", lambda: "the world")


def test_a_clipping_that_raises_gives_the_gate_back() -> None:
    """The gate was taken in the pre hook, and no post hook will come: a freeze must not wait for it, the state counts as torn."""
    model, adopted, gate = adopt(clip=ttp.ClipNorm(0.1))
    model.weight.grad = torch.ones(1, 1).expand(2, 2)  # cannot be written in place
    with pytest.raises(RuntimeError, match="single memory location"):
        adopted.optimizer.step()
    report = frozen(gate)
    assert (report.closed, report.torn, report.state_step) == (True, True, 0)


@pytest.mark.parametrize("goes_on", ["begin_pass", "step"])
def test_a_trainer_that_goes_on_after_a_failed_update_is_stopped(goes_on: str) -> None:
    """No hook reports an update that raised; the next call does, gives the gate back, and nothing is updated any more."""
    _, adopted, gate = adopt()
    adopted.optimizer.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        adopted.optimizer.step()
    next_call = adopted.begin_pass if goes_on == "begin_pass" else adopted.optimizer.step
    with pytest.raises(ProtocolError, match="update of step 1 raised, and the trainer went on"):
        next_call()
    report = frozen(gate)
    assert (report.closed, report.torn) == (True, True)
    thaw(gate, 1)
    with pytest.raises(ProtocolError):
        adopted.optimizer.step()
    assert len(adopted.optimizer.threads) == 1  # type: ignore[attr-defined]


def test_a_step_that_another_thread_rolls_forward_is_updated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer caught its collective's failure and calls step() again, in the middle of the roll forward: it waits at the gate."""

    def broken(vector: torch.Tensor, group: Any) -> None:
        raise RuntimeError("connection closed by peer")

    other_ranks(monkeypatch, 2, 1, broken)
    model, adopted, gate = adopt()
    optimizer = adopted.optimizer
    assert isinstance(optimizer, Watched)
    optimizer.goes_on.clear()
    before = model.weight.detach().clone()
    caught = threading.Event()

    def train() -> None:
        with pytest.raises(RuntimeError, match="closed by peer"):
            optimizer.step()
        caught.set()
        assert optimizer.entered.wait(LONG_S)
        optimizer.step()

    trainer = threading.Thread(target=train, daemon=True)  # waits at the gate for the end of the process
    trainer.start()
    assert caught.wait(LONG_S)
    assert freeze(gate, 1, LONG_S).phase is Phase.READY
    record = CommitRecord(1, 0.0, 1.0, False, 1.0, (0.1,), ())

    def roll() -> None:
        gate.start_roll_forward(record)
        gate.rolled_forward(adopted.roll_forward(record))

    roller = threading.Thread(target=roll)
    roller.start()
    deadline = time.monotonic() + LONG_S
    while not (is_at_the_gate(trainer) or len(optimizer.threads) > 1):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    optimizer.goes_on.set()
    roller.join(LONG_S)
    assert optimizer.threads == [roller.ident]
    assert torch.equal(model.weight.detach(), before - 0.1)
    assert (gate.state_step, adopted.current_step) == (1, 1)


def is_at_the_gate(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "_pass" in names and "ready" in names


def test_a_step_that_calls_its_parent_s_is_one_step() -> None:
    """Torch calls the hooks in both, as soon as it has seen an optimizer of the parent class."""
    SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model, adopted, gate = adopt()
    before = model.weight.detach().clone()
    for step in (1, 2):
        adopted.optimizer.step()
        assert (gate.phase, gate.state_step, adopted.current_step) == (Phase.DONE, step, step)
    torch.testing.assert_close(model.weight.detach(), before - 0.2)
    adopted.optimizer.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        adopted.optimizer.step()
    with pytest.raises(ProtocolError, match="update of step 3 raised"):
        adopted.optimizer.step()


@pytest.mark.parametrize("step", [1, 4096, 94_906_269, 200_000_033])
def test_ranks_at_the_same_step_agree_at_any_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The squares of great steps are beyond FP64's integers."""
    other_ranks(monkeypatch, 3, step)
    _, adopted, _ = adopt()
    assert adopted._agree(step)[0].step == step


@pytest.mark.parametrize("step", [1, 4096, 94_906_269, 200_000_033])
def test_a_rank_that_is_one_step_off_is_found_at_any_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """With what to do about it."""
    other_ranks(monkeypatch, 3, step - 1)
    _, adopted, _ = adopt()
    with pytest.raises(ProtocolError, match=rf"step {step}: other ranks are at another step than this one; call"):
        adopted._agree(step)


def test_a_rank_is_waiting_in_the_collectives_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang in the trainer's own state_dict is a hang; one that waits for others to compare or to agree is none."""
    seen: dict[str, bool] = {}

    def exchange(value: Any, device: torch.device) -> list[Any]:
        seen["differing"] = gate.waiting
        raise ConnectionError("a peer is gone")

    def broken(vector: torch.Tensor, group: Any) -> None:
        seen["agree"] = gate.waiting
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(module, "exchange_json", exchange)
    other_ranks(monkeypatch, 2, 1, broken)
    _, adopted, gate = adopt()
    with pytest.raises(ConnectionError):
        adopted.compare_replicas()
    assert not gate.waiting
    adopted.on_ready = lambda step: seen.update(host=gate.waiting)
    with pytest.raises(RuntimeError):
        adopted.optimizer.step()
    assert seen == {"differing": True, "host": False, "agree": True} and not gate.waiting


def test_a_param_group_that_is_added_later_is_refused() -> None:
    """At the next step and before anything is sent to others: no other rank knows of its state, no checkpoint would hold it."""
    _, adopted, gate = adopt()
    adopted.optimizer.step()
    late = torch.nn.Parameter(torch.zeros(2))
    adopted.optimizer.add_param_group({"params": [late]})
    with pytest.raises(ConfigError, match="has 2 param groups, it had 1 when"):
        adopted.optimizer.step()
    assert (gate.phase, gate.step) == (Phase.DONE, 1)
    adopted.optimizer.param_groups.pop()
    adopted.optimizer.param_groups[0]["params"][0] = late
    with pytest.raises(ConfigError, match="param group 0 of Watched has 2 parameters that are not the 2"):
        adopted.optimizer.step()


@pytest.mark.parametrize("unscaled", [False, True])
def test_the_loss_scale_comes_off_before_ttp_clips(unscaled: bool) -> None:
    """A fused optimizer divides by the scale within its update: the norm before it would be that of scaled gradients."""
    model, adopted, _ = adopt(lambda params: AdamW(params, lr=0.1, fused=True), clip=ttp.ClipNorm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if unscaled:
        scaler.unscale_(adopted.optimizer)
        scaler.step(adopted.optimizer)
    else:
        with pytest.raises(ConfigError, match=r"call scaler.unscale_\(optimizer\)"):
            scaler.step(adopted.optimizer)
    assert adopted.current_step == unscaled


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_loss_scaler_skips_changes_nothing(fused: bool) -> None:
    """A fused optimizer skips within its step, which counts then; the next step goes on either way."""
    model, adopted, gate = adopt(lambda params: AdamW(params, lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for factor in (float("inf"), 1.0):
        adopted.optimizer.zero_grad()
        adopted.begin_pass()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(adopted.optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor != 1.0)
    assert adopted.current_step == gate.state_step == (2 if fused else 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_step_is_protected_and_compiled_once() -> None:
    """The hooks are not part of what is compiled."""
    _, adopted, gate = adopt(lambda params: SGD(params, lr=0.1))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(adopted.optimizer.step, backend=backend)
    for _ in range(2):
        step()
    compiled = len(graphs)
    for _ in range(2):
        step()
    assert gate.state_step == 4 and len(graphs) == compiled


@pytest.mark.parametrize(("value", "norm"), [(1.0, 6**0.5), (torch.inf, torch.inf)])
def test_a_barrier_that_reports_the_norm_updates_as_one_that_does_not(value: float, norm: float) -> None:
    """`ttp chaos` compares it in every step; nothing is clipped for it, and nothing skipped."""
    models = []
    for norm_needed in (False, True):
        model, adopted, _ = adopt(norm_needed=norm_needed)
        model.bias.grad.fill_(value)
        adopted.optimizer.step()
        record = adopted.last_record
        assert adopted.mode == "barrier" and record is not None and not record.skipped
        assert record.grad_norm == pytest.approx(norm if norm_needed else 0.0) and record.clip_factor == 1.0
        models.append(model)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_the_norm_of_a_sparse_gradient_counts_each_row_as_often_as_it_was_looked_up() -> None:
    """An embedding's gradient holds rows, some of them twice."""
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    adopted = AdoptedOptimizer(embedding, SGD(embedding.parameters(), lr=0.1), norm_needed=True)
    adopted.attach(Gate(0))
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    adopted.optimizer.step()
    assert adopted.last_record is not None and adopted.last_record.grad_norm == pytest.approx((2 * 4 + 2) ** 0.5)


@pytest.mark.parametrize("named", [True, False])
def test_a_closure_runs_once_before_the_rank_is_ready(named: bool) -> None:
    """READY says that the gradients are final: the passes of `step(closure)` come first, and its result is what step() returns."""
    model, adopted, _ = adopt(lambda params: AdamW(params, lr=0.1))
    order: list[str] = []
    adopted.on_ready = lambda step: order.append("ready")
    before = model.weight.detach().clone()

    def closure() -> Any:
        order.append("passes")
        adopted.optimizer.zero_grad()
        loss: Any = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    expected = model(torch.ones(1, 2)).sum()
    step: Any = adopted.optimizer.step
    loss = step(closure=closure) if named else step(closure)
    assert order == ["passes", "ready"] and adopted.current_step == 1
    assert torch.equal(loss, expected) and not torch.equal(model.weight, before)
