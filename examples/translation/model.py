"""The encoder-decoder that `train.py` trains: its sizes, and which pipeline stage each layer is in."""

from __future__ import annotations

from ttp.trainer.config.encoder_decoder_config import EncoderDecoderConfig
from ttp.trainer.parallel.op_parallel import PipelineFunc, PlacedLayer, TransformerOpParallelConfig, place_layers


def pipeline_func(
    network: PlacedLayer, layer_id: int, offset: int, parallel_config: TransformerOpParallelConfig, layers: int
) -> None:
    """Divide the layers evenly over the stages, with embeddings in the first one and the output in the last. `train.py --pipeline_func FILE`
    takes another one."""
    network.pipeline_stage = (layer_id + offset) * parallel_config.pipeline_stage // layers


def net(
    *,
    src_len: int,
    tgt_len: int,
    hidden_size: int,
    vocab_size: int,
    en_layer: int,
    de_layer: int,
    parallel_config: TransformerOpParallelConfig,
    num_heads: int = 8,
    ffn_hidden_size: int | None = None,
    embedding_dropout: float = 0.1,
    tied: bool = False,
    place: PipelineFunc = pipeline_func,
) -> EncoderDecoderConfig:
    """Return the model: pre-norm blocks with biases and GELU, learned positions, embeddings of source and target, and an output."""
    stages, recomputed = place_layers(place, parallel_config, en_layer, de_layer)
    return EncoderDecoderConfig(
        num_layers=en_layer + de_layer,
        encoder_layers=en_layer,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size or hidden_size,
        num_attention_heads=num_heads,
        source_length=src_len,
        seq_length=tgt_len,
        vocab_size=vocab_size,
        position_embedding_type="absolute",
        normalization="LayerNorm",
        activation="gelu",
        use_bias=True,
        embedding_dropout=embedding_dropout,
        untie_embeddings_and_output_weights=not tied,
        vocab_emb_dp=parallel_config.vocab_emb_dp and not tied,
        layer_stages=stages,
        recomputed_layers=recomputed,
    )
