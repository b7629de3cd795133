"""Envelopes above a size, in chunks: gRPC refuses a message above `transport.MAX_MESSAGE_BYTES`, in either direction.

Owns the cutting and the joining; a stream has one `Joiner` for what comes in. Never looks into an envelope but at its chunk: who is
allowed to speak was checked before.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ttp.proto import control_pb2 as pb
from ttp.proto.codec import CodecError

CHUNK_BYTES = 8 << 20
"""Of an envelope that is larger; what is not is sent as it is."""
MAX_WHOLE_BYTES = 512 << 20
"""Of all chunks of one envelope."""

E = TypeVar("E", pb.UpwardEnvelope, pb.DownwardEnvelope)


def split(envelope: E, chunk_bytes: int = CHUNK_BYTES) -> list[E]:
    """Return what to send for an envelope: itself, or its chunks in order. Raises CodecError above MAX_WHOLE_BYTES."""
    nbytes = envelope.ByteSize()
    if nbytes <= chunk_bytes:
        return [envelope]
    if nbytes > MAX_WHOLE_BYTES:
        raise CodecError(f"a message is too large: got {nbytes} bytes, expected at most {MAX_WHOLE_BYTES}")
    content = envelope.SerializeToString()
    chunks = []
    for begin in range(0, nbytes, chunk_bytes):
        chunk = type(envelope)(job_id=envelope.job_id, term=envelope.term)
        chunk.chunk = content[begin : begin + chunk_bytes]
        chunk.more = begin + chunk_bytes < nbytes
        chunks.append(chunk)
    return chunks


class Joiner(Generic[E]):
    """Puts the chunks of one stream together."""

    def __init__(self) -> None:
        self._content = bytearray()

    def take(self, envelope: E) -> E | None:
        """Return the whole envelope, None while more of it is to come. Raises CodecError for chunks that make none."""
        if not envelope.chunk:
            if self._content or envelope.more:
                raise CodecError("a message is cut off: got another message, expected its next chunk")
            return envelope
        if len(self._content) + len(envelope.chunk) > MAX_WHOLE_BYTES:
            raise CodecError(f"a message is too large: got more than {MAX_WHOLE_BYTES} bytes in chunks")
        self._content += envelope.chunk
        if envelope.more:
            return None
        content, self._content = bytes(self._content), bytearray()
        try:
            whole = type(envelope).FromString(content)
        except Exception as error:  # protobuf's own
            raise CodecError(f"the chunks of a message cannot be read: {error}") from None
        if whole.chunk or whole.more or (whole.job_id, whole.term) != (envelope.job_id, envelope.term):
            raise CodecError("the chunks of a message hold another job's or term's, or chunks again")
        return whole
