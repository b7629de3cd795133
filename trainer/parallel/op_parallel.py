"""Global settings of an encoder-decoder's parallelism by MindSpore's names, and the pipeline stage of each layer by a function of the user.

Owns `TransformerOpParallelConfig` and how a `pipeline_func` is loaded and called. Never imports torch.
"""

from __future__ import annotations

import inspect
import runpy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.errors import ConfigError

from ..config.schema import check


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerOpParallelConfig:
    data_parallel: int = 1
    """Ranks that train on different samples of a batch."""
    model_parallel: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_stage: int = 1
    """Stages that the layers are divided into."""
    micro_batch_num: int = 1
    """Parts of a batch that are computed one after the other."""
    optimizer_shard: bool = False
    """The optimizer's state is divided over the data-parallel ranks, each shard held by two; False: every one holds all of it."""
    gradient_aggregation_group: int = 4
    """About how many messages a rank's gradients are sent in."""
    recompute: bool = False
    """Backward computes the activations of every layer again."""
    vocab_emb_dp: bool = True
    """Every model-parallel rank has the whole embeddings; False: some rows of them."""

    def __post_init__(self) -> None:
        for name in (
            "data_parallel",
            "model_parallel",
            "pipeline_stage",
            "micro_batch_num",
            "gradient_aggregation_group",
        ):
            check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")


@dataclass(slots=True)
class PlacedLayer:
    """What a `pipeline_func` gets as `network`."""

    pipeline_stage: int = 0
    recomputed: bool = False

    def recompute(self, mode: bool = True) -> None:
        """Compute this layer's activations again in backward."""
        self.recomputed = mode

    def set_comm_fusion(self, fusion_type: int) -> None:
        """Change nothing: gradients are sent in groups that fill up in backward, whatever their layers (`gradient_aggregation_group`)."""


PipelineFunc = Callable[[PlacedLayer, int, int, TransformerOpParallelConfig, int], None]
"""(network, layer_id, offset, parallel_config, layers): of the encoder's layers with offset 0, then of the decoder's with the number of
the encoder's layers; `layers`: all of them."""
_TAKES = ("network", "layer_id", "offset", "parallel_config", "layers")


def place_layers(
    place: PipelineFunc, parallel: TransformerOpParallelConfig, encoder_layers: int, decoder_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the stage of each layer, and which layers are recomputed. Raises ConfigError for a stage that is not an integer."""
    placed = []
    for offset, count in ((0, encoder_layers), (encoder_layers, decoder_layers)):
        for layer_id in range(count):
            layer = PlacedLayer()
            try:
                place(layer, layer_id, offset, parallel, encoder_layers + decoder_layers)
            except Exception as error:
                raise _raised(error) from error
            stage: object = layer.pipeline_stage
            if not isinstance(stage, int):
                raise ConfigError(
                    f"pipeline_func: got pipeline_stage {stage!r} for layer {layer_id + offset}, expected an integer. Correct it"
                )
            placed.append(layer)
    return tuple(layer.pipeline_stage for layer in placed), tuple(
        n for n, layer in enumerate(placed) if layer.recomputed
    )


def _raised(error: Exception) -> ConfigError:
    """Name an exception of the user's file and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else f"{last.filename}:{last.lineno}"
    return ConfigError(f"pipeline_func: {place} raised {type(error).__name__}: {error}. Correct it")


def load_pipeline_func(path: str) -> PipelineFunc:
    """Return the function `pipeline_func` of a Python file. Raises ConfigError."""
    if not Path(path).is_file():
        raise ConfigError(f"--pipeline_func: got {path}, expected a Python file. Correct the path")
    try:
        names: dict[str, Any] = runpy.run_path(path)
    except Exception as error:
        raise _raised(error) from error
    found = names.get("pipeline_func")
    if not callable(found):
        raise ConfigError(
            f"--pipeline_func: got {path}, which defines no pipeline_func, expected that function. Add it"
        )
    try:
        inspect.signature(found).bind(*_TAKES)
    except TypeError as error:
        raise ConfigError(
            f"--pipeline_func: got {path}, whose pipeline_func does not take ({', '.join(_TAKES)}) by position ({error}), expected that."
            " Correct it"
        ) from None
    return found  # type: ignore[no-any-return]
