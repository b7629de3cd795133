"""The translation example: pairs from each kind of file, a tokenizer of them, and what its programs refuse in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.shown import ROOT
from tests.unit.examples.loading import EXAMPLES
from ttp.errors import ConfigError, TTPError
from ttp.launch.hosts.rank_table import read_rank_table
from ttp.trainer.config.encoder_decoder_config import EncoderDecoderConfig
from ttp.trainer.model.gpt import UNCOUNTED
from ttp.trainer.parallel.op_parallel import PlacedLayer, TransformerOpParallelConfig, load_pipeline_func, place_layers
from ttp.trainer.parallel.pipeline_stages import check_stages, cut_of
from ttp.trainer.world import World

FOLDER = EXAMPLES / "translation"
NAMES = ("numerals", "dataset", "model", "preprocess", "train")
SGM = """<refset setid="newstest2014" srclang="any" trglang="{language}">
<doc sysid="ref" docid="1">
<hl>
<seg id="1">{first}</seg>
</hl>
<p>
<seg id="2">a &amp; b	tab</seg>
<seg id="3"></seg>
</p>
</doc>
</refset>
"""
DOCUMENT = """
total_layers, layers_per_stage = 12, 3

def pipeline_func(network, layer_id, offset, parallel_config, layers):
    pp_id = max(int(layer_id + offset) / layers_per_stage, 1)
    network.pipeline_stage = int(pp_id)
    gradient_aggregation_group = 4
    dis = max(int((layer_id + offset) / gradient_aggregation_group), 1)
    network.set_comm_fusion(int((layer_id + offset) / dis) + 1)
    if layer_id == 2:
        network.recompute()
    print(f"pipeline id is:{pp_id}", flush=True)
"""
"""The document's function, for five layers of an encoder and five of a decoder in four stages."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The example's files as modules, which import each other by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the example as its users do."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [words[0], str(FOLDER / words[1]), *words[2:]]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=120)


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_numerals_are_translated(programs: dict[str, ModuleType]) -> None:
    """German says units before tens, in one word; every number has a translation of its own."""
    english, german = programs["numerals"].english, programs["numerals"].german
    assert [(english(n), german(n)) for n in (0, 1, 17, 21, 101, 342, 2100)] == [
        ("zero", "null"),
        ("one", "eins"),
        ("seventeen", "siebzehn"),
        ("twenty one", "einundzwanzig"),
        ("one hundred and one", "einhunderteins"),
        ("three hundred and forty two", "dreihundertzweiundvierzig"),
        ("two thousand one hundred", "zweitausendeinhundert"),
    ]
    assert len({say(n) for n in range(10_000) for say in (english, german)}) == 20_000


def test_wmt14_becomes_pairs_in_both_directions_and_a_tokenizer(tmp_path: Path) -> None:
    """With the document's command and names; entities are characters, a pair with an empty side is left out, a tab is a space."""
    (tmp_path / "test-full").mkdir()
    for language, first in (("en", "Good morning"), ("fr", "Bonjour à tous")):
        path = tmp_path / "test-full" / f"newstest2014-fren-ref.{language}.sgm"
        path.write_text(SGM.format(language=language, first=first), encoding="utf-8")
    done = run(["python", "preprocess.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "write output/wmt14.en_fr.txt file finished!\n total count = 2\n" in done.stdout
    assert read(tmp_path / "output" / "wmt14.en_fr.txt") == ["Good morning\tBonjour à tous", "a & b tab\ta & b tab"]
    assert read(tmp_path / "output" / "wmt14.fr_en.txt") == ["Bonjour à tous\tGood morning", "a & b tab\ta & b tab"]
    assert (tmp_path / "output" / "tokenizer.json").is_file()


def test_two_aligned_files_and_one_of_pairs_become_the_same(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.en").write_text("one\n\nthree\n")
    Path("a.fr").write_text("un\ndeux\ntrois\n")
    Path("pairs.txt").write_text("one\tun\nthree\ttrois\n")
    for arguments in (["--source", "a.en", "--target", "a.fr"], ["--pairs", "pairs.txt"]):
        monkeypatch.setattr(sys, "argv", ["preprocess.py", *arguments, "--output", arguments[0].strip("-")])
        assert programs["preprocess"].main() == 0
    assert read(Path("source/wmt14.en_fr.txt")) == read(Path("pairs/wmt14.en_fr.txt")) == ["one\tun", "three\ttrois"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"test-full/newstest2014-fren-ref.en.sgm: got no such file, expected WMT14's. Unpack test-full.tgz"),
        (["--source", "one.txt"], "expected --source with --target"),
        (["--source", "one.txt", "--target", "two.txt"], "one.txt has 1 sentences, two.txt has 2"),
        (["--pairs", "one.txt"], "one.txt, line 1: got 1 columns, expected two"),
        (["--numerals", "0"], "--numerals: got 0, expected 1 to 10000"),
        (["--numerals", "9", "--vocab_size", "100"], "--vocab_size: got 100, expected 260 or more"),
    ],
)
def test_what_cannot_become_pairs_is_refused(
    programs: dict[str, ModuleType],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, status 2, no file."""
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("one\n")
    Path("two.txt").write_text("one\ntwo\n")
    monkeypatch.setattr(sys, "argv", ["preprocess.py", *arguments])
    assert programs["preprocess"].main() == 2
    assert re.fullmatch(f"preprocess.py: .*{message}.*\n", capsys.readouterr().err) and not Path("output").exists()


@pytest.fixture
def prepared(programs: dict[str, ModuleType], tmp_path: Path) -> Path:
    """Return the file of 40 pairs, with a tokenizer beside it."""
    numerals = programs["numerals"]
    pairs = [(numerals.english(n), numerals.german(n)) for n in range(100, 140)]
    programs["preprocess"].write(pairs, tmp_path, 300)
    return tmp_path / "wmt14.fr_en.txt"


def test_sentences_are_cut_filled_up_and_taken_once_an_epoch(programs: dict[str, ModuleType], prepared: Path) -> None:
    """Each ends with END; what is filled up is not counted. All pairs come once, and in another order in the next epoch."""
    dataset = programs["dataset"]
    tokenizer = dataset.Tokenizer(prepared.parent / "tokenizer.json")
    pairs = dataset.ToyDataset(str(prepared), (8, 50), tokenizer)
    source_BS, targets_BT = pairs.batch(0, 40)
    assert source_BS.shape == (40, 8) and targets_BT.shape == (40, 50)
    lengths = (targets_BT != UNCOUNTED).sum(1)
    assert int(lengths.sum()) == pairs.counted(0, 40) and bool((lengths < 50).all())
    for row, length in zip(targets_BT, lengths, strict=True):
        assert int(row[length - 1]) == dataset.END and bool((row[length:] == UNCOUNTED).all())
    assert bool((source_BS == dataset.END).any(1).all()), "cut ones end too"
    texts = [
        [tokenizer.decode([t for t in row.tolist() if t > 3]).strip() for row in pairs.batch(epoch * 40, 40)[1]]
        for epoch in (0, 1)
    ]
    written = sorted(line.split("\t")[1] for line in read(prepared))
    assert sorted(texts[0]) == sorted(texts[1]) == written and texts[0] != texts[1]
    assert [pairs.epoch(position) for position in (39, 40)] == [0, 1]
    shorter = dataset.ToyDataset(str(prepared), (8, 5), tokenizer)
    assert shorter.fingerprint() != pairs.fingerprint(), "other samples, which a restart must notice"


def config_of(programs: dict[str, ModuleType], ranks: int, *arguments: str) -> tuple[argparse.Namespace, Any]:
    train = programs["train"]
    args = train.make_parser().parse_args(["--distribute=true", *arguments])
    return args, train.config_of(args, train.parallel_config_of(args, World(0, ranks, 0, launched=True)), 7)


def test_the_documents_defaults(programs: dict[str, ModuleType]) -> None:
    """Of the program's options, and of the global settings."""
    args = programs["train"].make_parser().parse_args([])
    expected = {
        "train": True, "file_path": "./output/wmt14.fr_en.txt", "distribute": False, "micro_batch_num": 1, "src_len": 10, "tgt_len": 10,
        "vocab_size": 20000, "d_model": 128, "encoder_layer": 1, "decoder_layer": 1, "pipeline_stage": 1, "batch_size": 32,
        "lr": 0.0001, "mp": 1, "keep_checkpoint_max": 4, "save_checkpoint_steps": 1, "epochs": 1, "gradient_accumulation_shard": True,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    settings = TransformerOpParallelConfig()
    assert (settings.data_parallel, settings.model_parallel, settings.pipeline_stage, settings.micro_batch_num) == (
        1,
        1,
        1,
        1,
    )
    assert (settings.optimizer_shard, settings.gradient_aggregation_group) == (False, 4)
    assert (settings.recompute, settings.vocab_emb_dp) == (False, True)


def test_global_settings_are_the_trainers(programs: dict[str, ModuleType]) -> None:
    """A batch is that of all ranks; gradients accumulate in shards where there are data-parallel ranks and stages."""
    arguments = ("--mp=2", "--pipeline_stage=2", "--micro_batch_num=4", "--vocab_emb_dp=false", "--recompute=true")
    _, config = config_of(programs, 8, *arguments, "--gradient_aggregation_group=3", "--enable_parallel_optimizer=0")
    assert (config.dataset_config.batch_size, config.dataset_config.micro_batch_num) == (4, 4)
    parallel, training = config.parallel_config, config.training_config
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.gradient_buckets) == (
        2,
        2,
        3,
    )
    assert training.gradient_accumulation_shard and training.recompute == "full"
    assert not training.use_distributed_optimizer and not config.model_config.vocab_emb_dp
    assert config.model_config.layer_stages == (0, 1)
    _, flat = config_of(programs, 8, "--mp=8")
    assert not flat.training_config.gradient_accumulation_shard and flat.training_config.use_distributed_optimizer


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (6, ["--mp=4"], "--mp 4 x --pipeline_stage 1: got 6 ranks, expected a multiple of the product"),
        (8, ["--batch_size=12"], "--batch_size: got 12, expected a multiple of 8 data-parallel ranks x 1"),
        (1, ["--encoder_layer=0"], "--encoder_layer: got 0"),
        (2, ["--mp=2", "--tied=true", "--pipeline_func=no.py"], "--pipeline_func: got no.py, expected a Python file"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    programs: dict[str, ModuleType], ranks: int, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(programs, ranks, *arguments)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_documents_pipeline_func_places_layers(
    programs: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, in a file of the user's: embeddings alone in the first stage; marks for recomputation are kept."""
    path = tmp_path / "mine.py"
    path.write_text(DOCUMENT)
    sizes = ("--encoder_layer=5", "--decoder_layer=5", "--pipeline_stage=4", "--micro_batch_num=4")
    _, config = config_of(programs, 4, *sizes, f"--pipeline_func={path}")
    assert isinstance(config.model_config, EncoderDecoderConfig)
    assert config.model_config.layer_stages == (1,) * 6 + (2,) * 3 + (3,)
    assert config.model_config.recomputed_layers == (2, 7)
    assert [stage.stop_layer for stage in cut_of(config)] == [0, 6, 9, 10]
    assert capsys.readouterr().out.count("pipeline id is:") == 10
    _, alone = config_of(programs, 1, "--encoder_layer=5", "--decoder_layer=5", f"--pipeline_func={path}")
    check_stages(alone)
    assert [stage.stop_layer for stage in cut_of(alone)] == [10], "with one stage the function decides nothing"


def test_a_pipeline_func_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("def place(): ...\n")
    with pytest.raises(ConfigError, match="defines no pipeline_func"):
        load_pipeline_func(str(path))

    path.write_text("def pipeline_func(network, layer_id): ...\n")
    with pytest.raises(ConfigError, match=r"does not take \(network, layer_id, offset, parallel_config, layers\)"):
        load_pipeline_func(str(path))

    for code in ("    raise KeyError(layer_id)", "    return 1 +"):
        path.write_text(f"def pipeline_func(network, layer_id, offset, parallel_config, layers):\n{code}\n")
        with pytest.raises(
            ConfigError, match=rf"^pipeline_func: {path}:2 raised (KeyError: 0|SyntaxError: .*)\. Correct it$"
        ):
            place_layers(load_pipeline_func(str(path)), TransformerOpParallelConfig(), 1, 1)

    def half(network: PlacedLayer, layer_id: int, *_: object) -> None:
        network.pipeline_stage = layer_id / 2  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"got pipeline_stage 0\.0 for layer 0, expected an integer"):
        place_layers(half, TransformerOpParallelConfig(), 1, 1)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_the_rank_tables_are_read(size: int) -> None:
    """Of one machine, and of two with eight devices."""
    table = read_rank_table(str(FOLDER / f"rank_table_{size}pcs.json"))
    assert [rank for server in table.servers for rank in server.ranks] == list(range(size))
    assert len(table.servers) == (2 if size == 16 else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.sh"], "run.sh: arguments: got 0, expected DATA_PATH and RANK_SIZE"),
        (["run.sh", ".", "3"], "run.sh: RANK_SIZE: got 3, expected one with a table rank_table_3pcs.json"),
        (
            ["run_cluster.sh", ".", "t.json", "16", "4"],
            "run_cluster.sh: RANK_START: got 4, expected a multiple of 8 below 16",
        ),
        (["run.sh", "none/pairs.txt", "2"], "run.sh: DATA_PATH: got none/pairs.txt, expected a file of pairs"),
        (
            ["run_cluster.sh", "none/pairs.txt", "t.json", "16", "8"],
            "run_cluster.sh: DATA_PATH: got none/pairs.txt, expected a file of pairs",
        ),
        (["run_parallel_save_ckpt.sh"], "run_parallel_save_ckpt.sh: DATA_PATH: got none"),
        (["run_parallel_recover_ckpt.sh"], "run_parallel_recover_ckpt.sh: DATA_PATH: got none"),
    ],
)
def test_a_script_that_cannot_start_says_so_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    done = run(["bash", *words], tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_pairs_that_cannot_be_read_are_one_line_and_status_2(prepared: Path, tmp_path: Path) -> None:
    """Of the program itself: a tokenizer of more tokens than the model, and one that is not there."""
    done = run(["python", "train.py", f"--file_path={prepared}", "--vocab_size=270"], tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("train.py: ConfigError: --vocab_size: got 270, expected 300")
    done = run(["python", "train.py"], tmp_path)
    assert done.returncode == 2 and "output/tokenizer.json, expected a file that is there" in done.stderr
    assert done.stderr.count("\n") == 1 and issubclass(ConfigError, TTPError)


def test_every_test_that_the_page_names_is_there() -> None:
    """And each row names one, or says that there is none."""
    page = (ROOT / "docs" / "from" / "mindspore_transformer.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"\*(\w+)\* is\s+`(tests/[\w/]+\.py)`", page))
    assert set(files) == {"unit", "long", "split"}
    defined = "".join((ROOT / path).read_text(encoding="utf-8") for path in files.values())
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20 and not [name for name in named if f"def {name}(" not in defined]
    rows = [line for line in page.split("## Bytes and memory")[0].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| in the document", "| | test"))]
    proofs = [row.rstrip("| ").rpartition(" | ")[2] for row in rows]
    assert len(rows) > 50 and all(re.match(r"unit|long|split|none|tests/", proof) for proof in proofs), proofs
