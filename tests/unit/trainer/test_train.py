"""One rank's real training, start to end: the real optimizer, checkpoints, logs and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ttp
from tests.lone_process import lone_process
from tests.rooms import imported, python_files
from tests.unit.trainer.conftest import MakeConfig
from ttp.checkpoint.format.manifest import read_manifest
from ttp.trainer import train as train_module
from ttp.trainer.__main__ import main
from ttp.trainer.data.tokens import MemoryText
from ttp.trainer.metrics import MetricsFile, account, read_lines
from ttp.trainer.parallel import micro_batches
from ttp.trainer.schedule import learning_rate
from ttp.trainer.train import changed_order

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with lone_process(monkeypatch):
        yield


@pytest.fixture
def run(tmp_path: Path, small_keys: dict[str, Any]) -> Run:
    """Return a function that trains the small model into a folder and returns the folder."""

    def train(folder: str, changes: dict[str, Any] | None = None, status: int = 0) -> Path:
        output = tmp_path / folder
        keys = {**small_keys, "training_config.output_dir": output, **(changes or {})}
        assert main(["--config", "gpt_tiny", *(f"--{key}={value}" for key, value in keys.items())]) == status
        return output

    return train


def bits(output: Path) -> dict[int, tuple[str, str]]:
    return {
        step: (line["loss"], line["grad_norm"]) for step, line in account(read_lines(output / "metrics.jsonl")).items()
    }


def final(output: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((output / "final.json").read_text())
    return value


EVERYTHING = {
    "model_config.hidden_dropout": 0.1,
    "model_config.attention_dropout": 0.1,
    "dataset_config.micro_batch_num": 2,
    "optimizer_config.learning_rate_scheduler_kwargs.decay_steps": 50,
}


def test_same_seed_gives_the_same_bits_and_another_seed_others(run: Run) -> None:
    """Losses, gradient norms and final weights; with dropout and accumulation."""
    first, second = run("first", EVERYTHING), run("second", EVERYTHING)
    other = run("other", {**EVERYTHING, "training_config.seed": 7})
    assert sorted(bits(first)) == [1, 2, 3, 4, 5, 6]
    assert bits(first) == bits(second) and final(first) == final(second)
    assert bits(first)[1] != bits(other)[1]
    assert final(first)["weights_sha256"] != final(other)["weights_sha256"]
    assert final(first)["step"] == 6 and final(first)["consumed_samples"] == 24


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(run: Run) -> None:
    """Bit for bit; the logs and metrics go on in the same files."""
    whole = run("whole", {**EVERYTHING, "training_config.save_interval": 2})
    run("parts", {**EVERYTHING, "training_config.save_interval": 2, "training_config.training_iters": 4})
    torch.manual_seed(999)  # what the process drew before must not matter
    parts = run("parts", {**EVERYTHING, "training_config.save_interval": 2})
    assert bits(parts) == bits(whole) and final(parts) == final(whole)
    events = [(line["event"], line["from_step"]) for line in read_lines(parts / "metrics.jsonl") if "event" in line]
    assert events == [("start", 0), ("resume", 4)]
    log = (parts / "log" / "rank_0" / "info.log").read_text()
    assert [int(n) for n in re.findall(r"^train: Epoch:0, Step:(\d+), Loss: ", log, re.M)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_records_whether_its_interval_or_the_end_requested_it(run: Run) -> None:
    """As `ttp ckpt list` shows."""
    output = run("output", {"training_config.save_interval": 2, "training_config.training_iters": 3})
    manifests = sorted((output / "checkpoints").glob("iter_*/manifest.json"))
    causes = {path.parent.name: json.loads(path.read_text())["cause"]["kind"] for path in manifests}
    assert causes == {"iter_0000002": "periodic", "iter_0000003": "requested"}


def test_the_newest_checkpoints_stay_and_the_last_step_is_one_of_them(run: Run) -> None:
    """keep_checkpoint_max: when the run has ended, what was removed beside it is gone."""
    keys = {"training_config.save_interval": 1, "training_config.keep_checkpoint_max": 2}
    output = run("output", {**keys, "training_config.training_iters": 4})
    assert sorted(path.name for path in (output / "checkpoints").glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def test_line_that_was_lost_with_rank_0_comes_back_from_the_checkpoint(run: Run) -> None:
    """The process died after the update was committed and before the line was written."""
    changes = {**EVERYTHING, "training_config.save_interval": 4, "training_config.training_iters": 4}
    output = run("parts", changes)
    before = bits(output)
    path = output / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    run("parts", {**changes, "training_config.training_iters": 6})
    lines = account(read_lines(path))
    assert lines[4]["recovered"] and not lines[5].get("recovered")
    assert bits(output)[4] == before[4]
    assert lines[4]["lr"] == lines[3]["lr"] or len(lines[4]["lr"]) == 2


def test_run_resumes_over_damaged_lines_of_its_metrics(run: Run) -> None:
    """A power cut left zeros where a line was: the checkpoint is good, and the line comes back from it."""
    changes = {"training_config.save_interval": 3, "training_config.training_iters": 3}
    output = run("output", changes)
    path, before = output / "metrics.jsonl", bits(output)
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b"\0" * (len(last) - 1) + b"\n")
    run("output", {**changes, "training_config.training_iters": 4})
    assert bits(output)[3] == before[3] and sorted(bits(output)) == [1, 2, 3, 4]
    assert "metrics.jsonl: passed over damaged lines" in (output / "log" / "rank_0" / "info.log").read_text()


def test_the_logged_learning_rate_is_the_schedules_and_the_updates(run: Run, small_config: MakeConfig) -> None:
    """In the metrics, the log and the checkpoint's commit record; every step has another one, and a resumed run goes on in the
    schedule."""
    schedule = "{warmup_steps: 3, decay_steps: 9, end_learning_rate: 1.0e-5, use_cosine: true}"
    keys = {"optimizer_config.learning_rate": 1e-3, "optimizer_config.learning_rate_scheduler_kwargs": schedule}
    expected = {step: learning_rate(small_config(keys), step) for step in range(1, 7)}
    assert len(set(expected.values())) == 6
    run("output", {**keys, "training_config.save_interval": 1, "training_config.training_iters": 4})
    output = run("output", {**keys, "training_config.save_interval": 1})
    lines = account(read_lines(output / "metrics.jsonl"))
    assert {step: set(line["lr"]) for step, line in lines.items()} == {step: {rate} for step, rate in expected.items()}
    shown = re.findall(r"Step:(\d+), .*Learning_rate: \((\S+?),", (output / "log/rank_0/info.log").read_text())
    assert {int(step): float(rate) for step, rate in shown} == pytest.approx(expected, rel=1e-6)
    for step, rate in expected.items():
        record = read_manifest(output / "checkpoints" / f"iter_{step:07d}").record
        assert record is not None and set(record.learning_rates) == {rate}


def test_steps_of_another_size_go_on_at_the_checkpoints_data_position(run: Run) -> None:
    """As another world size makes them: 4 steps of 2 sequences, then 2 of 6. The position counts sequences, and none is trained twice or
    left out, whatever the step's number times the step's size is now."""
    run("other", {"training_config.training_iters": 4, "training_config.save_interval": 4})
    output = run("other", {"dataset_config.batch_size": 6})
    lines = account(read_lines(output / "metrics.jsonl"))
    assert [lines[step]["consumed_samples"] for step in range(1, 7)] == [2, 4, 6, 8, 14, 20]
    assert final(output)["consumed_samples"] == 20


def test_nothing_is_left_to_do_after_the_last_step(run: Run) -> None:
    """Starting a finished run again changes nothing."""
    changes = {"training_config.save_interval": 3}
    before = final(run("done", changes))
    assert final(run("done", changes)) == before
    assert "nothing to do: 6 of 6 steps are done" in (run("done", changes) / "log/rank_0/info.log").read_text()


def test_accumulation_is_the_same_gradient_as_one_batch(run: Run) -> None:
    """Two micro-batches of 2 take the same text as one of 4; the results differ by rounding alone."""
    one = run("one", {"dataset_config.batch_size": 4})
    two = run("two", {"dataset_config.micro_batch_num": 2})
    for step, (loss, norm) in bits(one).items():
        assert float.fromhex(bits(two)[step][0]) == pytest.approx(float.fromhex(loss), rel=1e-4), step
        assert float.fromhex(bits(two)[step][1]) == pytest.approx(float.fromhex(norm), rel=1e-3), step


def test_sum_reduction_scales_the_gradient_by_the_tokens_and_not_the_shown_loss(run: Run) -> None:
    """2 micro-batches x 2 sequences x 16 tokens."""
    keys = {"dataset_config.micro_batch_num": 2}
    mean, total = run("mean", keys), run("sum", {**keys, "training_config.loss_reduction": "sum"})
    (mean_loss, mean_norm), (sum_loss, sum_norm) = bits(mean)[1], bits(total)[1]
    assert float.fromhex(sum_loss) == pytest.approx(float.fromhex(mean_loss), rel=1e-6)
    assert float.fromhex(sum_norm) == pytest.approx(64 * float.fromhex(mean_norm), rel=1e-4)


def test_overflow_skips_the_step_and_lowers_the_scale(run: Run) -> None:
    """A scale that no float16 gradient survives: said in the line, and training continues once the scale fits."""
    keys = {"model_config.compute_dtype": "float16", "training_config.loss_scale": 2.0**40}
    output = run("output", {**keys, "training_config.training_iters": 40})
    lines = account(read_lines(output / "metrics.jsonl"))
    assert lines[1]["skipped"] and lines[1]["grad_norm"] == "inf" and lines[1]["grad_norm_value"] is None
    assert lines[1]["loss_scale"] == 2.0**40 and lines[2]["loss_scale"] == 2.0**39
    assert not lines[40]["skipped"]
    log = (output / "log" / "rank_0" / "info.log").read_text()
    assert re.search(r"Step:1, .*Finite_grads: False, Loss_scale: 1099511627776.0,", log)


def test_the_names_of_mindspores_adamw_are_adamw(run: Run) -> None:
    """The same bits; Adam has others. The layout's line is that of MindFormers, once an attempt."""
    outputs = {
        name: run(name, {"optimizer_config.optimizer_type": name, "training_config.training_iters": 3})
        for name in ("AdamW", "mint.AdamW", "SpeedAdamW", "Adam")
    }
    weights = {name: final(output)["weights_sha256"] for name, output in outputs.items()}
    assert weights["AdamW"] == weights["mint.AdamW"] == weights["SpeedAdamW"] != weights["Adam"]
    log = (outputs["AdamW"] / "log" / "rank_0" / "info.log").read_text()
    assert re.findall(r" (dp .*)", log) == ["dp 1 | pp 1 | tp 1 | sp False | vpp None"]


@pytest.mark.parametrize(
    "changes",
    [
        {"training_config.grad_clip_kwargs": "null"},
        {"training_config.grad_clip_kwargs": "{grad_clip_type: GradClipByValue, clip_value: 0.01}"},
        {
            "training_config.local_copy_os": "true",
            "optimizer_config.optimizer_type": "Adam",
            "optimizer_config.weight_decay": 0,
        },
        {"optimizer_config.optimizer_type": "SGD", "optimizer_config.learning_rate": 0.5},
        {
            "optimizer_config.optimizer_type": "SGD",
            "optimizer_config.learning_rate": 0.1,
            "optimizer_config.momentum": 0.9,
            "optimizer_config.nesterov": "true",
        },
        {"training_config.use_distributed_optimizer": "false"},
        {"model_config.compute_dtype": "bfloat16", "training_config.loss_scale": 4096},
        {"model_config.compute_dtype": "bfloat16", "model_config.params_dtype": "bfloat16"},
        {"model_config.compute_dtype": "float16", "training_config.loss_scale": 65536},
    ],
    ids=[
        "no clip",
        "clip by value",
        "Adam with local copy",
        "SGD",
        "SGD with Nesterov's momentum",
        "not distributed",
        "autocast and scale",
        "short weights",
        "float16",
    ],
)
def test_every_way_to_train_learns(run: Run, changes: dict[str, Any]) -> None:
    """The loss falls by a nat within 30 steps."""
    keys = {
        "training_config.training_iters": 30,
        "dataset_config.batch_size": 8,
        "optimizer_config.learning_rate": 5e-3,
    }
    output = run("output", {**keys, **changes})
    values = [line["loss_value"] for line in account(read_lines(output / "metrics.jsonl")).values()]
    assert values[-1] < values[0] - 1.0


def test_line_of_a_step_is_written_before_the_next_collective(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the state that belongs to a step is reported before its update."""
    seen: list[tuple[int, list[int], int]] = []
    step = ttp.TTPReplicaOptimizer.step
    metrics_path: list[Path] = []

    def watched(self: ttp.TTPReplicaOptimizer, *args: Any, **kwargs: Any) -> ttp.StepResult:
        number = self.current_step + 1
        written = sorted(account(read_lines(metrics_path[0])))
        state = ttp.current_session().holder.step_states.get(number)
        seen.append((number, written, state["consumed_samples"]))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(ttp.TTPReplicaOptimizer, "step", watched)

    def open_metrics(path: Path) -> MetricsFile:
        metrics_path.append(path)
        return MetricsFile(path)

    monkeypatch.setattr(train_module, "MetricsFile", open_metrics)
    run("output", {"training_config.training_iters": 3})
    assert seen == [(1, [], 2), (2, [1], 4), (3, [1, 2], 6)]


def test_exception_in_training_leaves_its_traceback_in_the_error_log_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And goes on to the caller."""
    monkeypatch.setattr(micro_batches, "token_loss", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("output")
    text = (tmp_path / "output" / "log" / "rank_0" / "error.log").read_text()
    assert text.count("Traceback (most recent call last)") == 1 and "ZeroDivisionError" in text


def test_output_folder_that_cannot_be_written_is_found_at_the_start(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any step."""
    (tmp_path / "file").write_text("")
    run("file/below", status=2)
    assert "training_config.output_dir is" in capsys.readouterr().err


def test_missing_text_ends_with_status_2_and_one_sentence(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before the ranks meet."""
    output = run("output", {"dataset_config.dataset_dir": "/nowhere"}, status=2)
    assert "ttp.trainer: DatasetError: /nowhere: no such file or folder" in capsys.readouterr().err
    assert "DatasetError: /nowhere" in (output / "log" / "rank_0" / "error.log").read_text()


def test_other_text_than_the_checkpoints_is_said(run: Run, tmp_path: Path) -> None:
    """It is allowed, and not silently: also where its file has the same name and size as before."""
    changes = {"training_config.save_interval": 1, "dataset_config.dataset_dir": tmp_path / "text"}
    changed = []
    for iters, text in ((1, "to be or not to be "), (2, "to be or not to be "), (3, "to do or not to do ")):
        (tmp_path / "text").write_text(text * 100)
        output = run("output", {**changes, "training_config.training_iters": iters})
        info = (output / "log" / "rank_0" / "info.log").read_text()
        changed.append(info.count("text differs from the checkpoint's; the data, or their order, will not match"))
    assert changed == [0, 0, 1]


def test_order_of_an_unchanged_text_is_reported_without_a_word_of_the_text(run: Run) -> None:
    """Another seed leaves the text as it was."""
    changes = {"training_config.save_interval": 1, "training_config.training_iters": 1}
    run("output", changes)
    output = run("output", {**changes, "training_config.training_iters": 2, "training_config.seed": 9})
    info = (output / "log" / "rank_0" / "info.log").read_text()
    assert "seed differs from the checkpoint's; the data, or their order, will not match the original run\n" in info


def test_checkpoint_from_before_contents_were_compared_warns_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it noted of the text cannot be compared; the checkpoints after it can. The text is looked at once a start, before ranks have met."""
    met: list[bool] = []

    def older(text: MemoryText) -> str:
        met.append(dist.is_initialized())
        return "0" * 16

    monkeypatch.setattr(MemoryText, "fingerprint", older)
    changes = {"training_config.save_interval": 1}
    run("output", {**changes, "training_config.training_iters": 1})
    assert met == [False]
    monkeypatch.undo()
    warned = []
    for iters in (2, 3):
        output = run("output", {**changes, "training_config.training_iters": iters})
        info = (output / "log" / "rank_0" / "info.log").read_text()
        warned.append(
            info.count(". The same text causes this once where the checkpoint's was noted otherwise: by an earlier")
        )
    assert warned == [1, 1]


def test_trainer_uses_only_what_ttp_gives_to_everybody() -> None:
    """`import ttp`, its errors, the checks of what comes from outside, the mode of its own files, the writer of curves, and how a refusal is recorded
    for ttprun; nothing else from inside."""
    given = {"ttp", "ttp.errors", "ttp.files", "ttp.curves.board", "ttp.exchange.error_file"}
    given |= {f"ttp.inputs.{name}" for name in ("checked", "input_file", "strict_yaml")}
    for path in python_files("trainer"):
        inside = {name for name in imported(path) if name.startswith("ttp") and not name.startswith("ttp.trainer")}
        assert inside <= given, path


def test_a_checkpoint_from_before_text_was_held_out_has_the_same_order() -> None:
    """Its state has no validation_share: it was 0. A share now is another order, and an imported model has none yet."""
    before = {"text": "a", "seq_length": 16, "seed": 1, "shuffle": True}
    assert changed_order(before, {**before, "validation_share": 0.0}) == []
    assert changed_order(before, {**before, "seed": 2, "validation_share": 0.1}) == ["seed", "validation_share"]
    assert changed_order({}, {**before, "validation_share": 0.1}) == []
