"""The encoder-decoder's part of the configuration: what a GPT has not.

Owns its keys, and the checks across keys of a whole configuration with such a model. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ttp.errors import ConfigError

from .schema import Config, ModelConfig, check


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderDecoderConfig(ModelConfig):
    """`num_layers` are the encoder's and then the decoder's; `seq_length` is the target's; embeddings that are tied are those of
    source and target, and the output."""

    encoder_layers: int
    """How many of the layers are the encoder's."""
    source_length: int
    """Tokens of a source sequence, padding included."""
    embedding_dropout: float = 0.0
    """Dropout of the embeddings."""
    vocab_emb_dp: bool = True
    """Every tensor-parallel rank has the whole embeddings; False: some rows of them."""
    layer_stages: tuple[int, ...] | None = None
    """Pipeline stage of each layer; null: the layers are divided evenly."""
    recomputed_layers: tuple[int, ...] = ()
    """Layers of which backward computes the activations again."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        at = "model_config."
        layers, encoder = self.num_layers, self.encoder_layers
        check(1 <= encoder < layers, at + "encoder_layers", encoder, f"1 to {layers - 1}, for {layers} layers in all")
        check(self.source_length >= 1, at + "source_length", self.source_length, "1 or more")
        dropout = self.embedding_dropout
        check(0 <= dropout < 1, at + "embedding_dropout", dropout, "0 <= p < 1")
        kind = self.position_embedding_type
        check(kind == "absolute", at + "position_embedding_type", kind, "absolute, for an encoder-decoder")
        check(self.num_experts is None, at + "num_experts", self.num_experts, "null, for an encoder-decoder")
        if self.vocab_emb_dp and not self.untie_embeddings_and_output_weights:
            raise ConfigError(
                "vocab_emb_dp: got true with tied embeddings, expected false: the output divides the matrix. Set it to false"
            )
        stages = self.layer_stages
        if stages is None:
            return
        check(len(stages) == layers, at + "layer_stages", list(stages), f"{layers} numbers, one a layer")
        falling = [number for number, (one, next_one) in enumerate(pairwise(stages), 1) if next_one < one]
        if falling:
            raise ConfigError(
                f"pipeline stage of layer {falling[0]}: got {stages[falling[0]]}, expected at least {stages[falling[0] - 1]}, the"
                " stage of the layer before. Correct pipeline_func"
            )


def check_encoder_decoder(config: Config) -> None:
    """Raise ConfigError for what only a GPT can do, and for layers in stages that are not there."""
    model, parallel = config.model_config, config.parallel_config
    if not isinstance(model, EncoderDecoderConfig):
        return
    if parallel.sequence_parallel or (parallel.virtual_pipeline_model_parallel_size or 1) > 1:
        raise ConfigError(
            "parallel_config: got sequence_parallel or virtual stages with an encoder-decoder, expected neither. Leave them out"
        )
    stages, count = model.layer_stages, parallel.pipeline_model_parallel_size
    if stages is None or count == 1:
        return
    if not 0 <= stages[0] <= stages[-1] < count:
        wrong = next(number for number, stage in enumerate(stages) if not 0 <= stage < count)
        raise ConfigError(
            f"pipeline stage of layer {wrong}: got {stages[wrong]}, expected 0 to {count - 1}. Correct pipeline_func, or change the"
            " number of stages"
        )
    empty = [stage for stage in range(1, count - 1) if stage not in stages]
    if empty:
        raise ConfigError(
            f"pipeline stage {empty[0]}: got no layer, expected one or more (only the first and the last stage may have none)."
            " Correct pipeline_func"
        )
