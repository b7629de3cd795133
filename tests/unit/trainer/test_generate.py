"""The next token is drawn as the options say, and a checkpoint continues a prompt from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.test_train import Run, own_process, run
from ttp.errors import ConfigError
from ttp.trainer.config.schema import ModelConfig
from ttp.trainer.data.tokenizer import Bytes
from ttp.trainer.generate import Sampling, continue_tokens, main, next_token, print_continuation
from ttp.trainer.model.gpt import build_model

__all__ = ["own_process", "run"]  # fixtures

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 2.0, 1.0, 3.0]).log_softmax(-1)


def drawn(sampling: Sampling, count: int = 1500) -> dict[int, float]:
    generator = torch.Generator().manual_seed(1)
    found = [next_token(LOGITS, sampling, generator) for _ in range(count)]
    return {token: found.count(token) / count for token in sorted(set(found))}


def test_zero_temperature_takes_the_most_likely_token() -> None:
    """Always; the first of equals."""
    assert drawn(Sampling(0.0), 5) == {3: 1.0}
    assert next_token(torch.tensor([1.0, 5.0, 5.0]), Sampling(), torch.Generator()) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_model_says(temperature: float) -> None:
    """With the chances of softmax(logits / temperature), within four standard deviations."""
    expected = (LOGITS / temperature).softmax(-1)
    found = drawn(Sampling(temperature))
    for token, chance in enumerate(expected.tolist()):
        assert abs(found.get(token, 0.0) - chance) < 4 * (chance * (1 - chance) / 1500) ** 0.5 + 1e-9


def test_top_k_and_top_p_leave_the_rest_out() -> None:
    """The chances, most likely first: 0.64, 0.24, 0.09, 0.03."""
    assert drawn(Sampling(1.0, top_k=1)).keys() == {3}
    assert drawn(Sampling(1.0, top_k=2)).keys() == {1, 3}
    assert drawn(Sampling(1.0, top_k=9)).keys() == {0, 1, 2, 3}
    assert drawn(Sampling(1.0, top_p=0.6)).keys() == {3}
    assert drawn(Sampling(1.0, top_p=0.7)).keys() == {1, 3}
    assert drawn(Sampling(1.0, top_p=0.95)).keys() == {1, 2, 3}
    assert drawn(Sampling(1.0, top_p=1e-9)).keys() == {3}


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(ConfigError, match="--" + next(iter(bad)).replace("_", "-")):
        Sampling(**bad)


def test_generation_goes_on_past_the_context_and_stops_at_the_end(small_model: ModelConfig) -> None:
    """The model sees its last seq_length tokens; the token that ends a text is not given."""
    model = build_model(small_model, 3, CPU).eval()
    prompt = list(range(40))
    made = list(continue_tokens(model, prompt, 20, Sampling(), 0))
    assert len(made) == 20
    tokens = prompt + made
    for place in (40, 59):
        with torch.no_grad():
            assert tokens[place] == int(model(torch.tensor([tokens[place - 16 : place]]))[0, -1].argmax())
    again = list(continue_tokens(model, prompt, 20, Sampling(1.0), 5))
    assert again == list(continue_tokens(model, prompt, 20, Sampling(1.0), 5))
    assert again != list(continue_tokens(model, prompt, 20, Sampling(1.0), 6))
    stop = again[7]
    assert list(continue_tokens(model, prompt, 20, Sampling(1.0), 5, stop=stop)) == again[: again.index(stop)]


def test_characters_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Not in halves; what remains at the end shows as it is."""
    print_continuation(Bytes(), list(b"gr"), iter("ößer".encode() + "ö".encode()[:1]))
    assert capsys.readouterr().out == "größer\ufffd\n"


def test_the_newest_valid_checkpoint_continues_the_prompt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """By the output folder, the folder of checkpoints, or one of them; a broken one is skipped, and said."""
    output = run("output", {"training_config.save_interval": 3, "training_config.training_iters": 6})
    checkpoints = output / "checkpoints"

    def generate(path: Path, *more: str) -> tuple[int, str, str]:
        status = main(
            ["--checkpoint", str(path), "--prompt", "The ", "--max-new-tokens", "8", "--device", "cpu", *more]
        )
        logged = capsys.readouterr()
        return status, logged.out, logged.err

    capsys.readouterr()
    status, text, said = generate(output, "--greedy")
    assert status == 0 and text.startswith("The ") and "iter_0000006: step 6" in said
    assert (
        generate(checkpoints, "--temperature", "0")[1] == generate(checkpoints / "iter_0000006", "--greedy")[1] == text
    )
    drawn = generate(output, "--seed", "1", "--top-k", "50", "--top-p", "0.9")
    assert drawn[0] == 0 and drawn == generate(output, "--seed", "1", "--top-k", "50", "--top-p", "0.9")
    older = generate(checkpoints / "iter_0000003", "--greedy")
    assert "step 3" in older[2]
    for file in (checkpoints / "iter_0000006").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    status, text, said = generate(output, "--greedy")
    assert status == 0 and text == older[1] and "skipping" in said and "step 3" in said
    status, _, said = generate(checkpoints / "iter_0000006", "--greedy")
    assert status == 2 and "CorruptCheckpoint" in said


def test_what_cannot_be_continued_is_refused_in_one_sentence(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint, no prompt, a wrong option: status 2."""
    (tmp_path / "empty").mkdir()
    output = run("output", {"training_config.save_interval": 1, "training_config.training_iters": 1})
    for arguments, expected in (
        (["--checkpoint", str(tmp_path / "empty"), "--prompt", "x"], "no checkpoint in"),
        (["--checkpoint", str(tmp_path / "missing"), "--prompt", "x"], "is not a directory"),
        (["--checkpoint", str(output), "--prompt", ""], "--prompt: got '', expected one token of text at least"),
        (["--checkpoint", str(output), "--prompt", "x", "--top-k", "0"], "--top-k: got 0"),
        (["--checkpoint", str(output), "--prompt", "x", "--max-new-tokens", "-1"], "--max-new-tokens: got -1"),
        (["--checkpoint", str(output), "--prompt", "x", "--seed", str(2**64)], "expected a number of 64 bits"),
        (["--checkpoint", str(output), "--prompt", "x", "--tokenizer", str(tmp_path)], "holds no tokenizer"),
    ):
        assert main(arguments) == 2
        assert expected in capsys.readouterr().err
