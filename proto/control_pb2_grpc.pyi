"""Types of the generated control_pb2_grpc.py, which has none. Written by hand: follows the service in control.proto."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from ttp.proto import control_pb2

class ControlStub:
    Attach: grpc.StreamStreamMultiCallable[control_pb2.UpwardEnvelope, control_pb2.DownwardEnvelope]
    Carry: grpc.StreamStreamMultiCallable[control_pb2.UpwardBundle, control_pb2.DownwardBundle]
    Status: grpc.UnaryUnaryMultiCallable[control_pb2.StatusRequest, control_pb2.JobStatus]
    Shutdown: grpc.UnaryUnaryMultiCallable[control_pb2.ShutdownRequest, control_pb2.ShutdownReply]
    def __init__(self, channel: grpc.Channel) -> None: ...

class ControlServicer:
    async def Attach(
        self,
        request_iterator: AsyncIterator[control_pb2.UpwardEnvelope],
        context: grpc.aio.ServicerContext[control_pb2.UpwardEnvelope, control_pb2.DownwardEnvelope],
    ) -> None: ...
    async def Carry(
        self,
        request_iterator: AsyncIterator[control_pb2.UpwardBundle],
        context: grpc.aio.ServicerContext[control_pb2.UpwardBundle, control_pb2.DownwardBundle],
    ) -> None: ...
    async def Status(
        self,
        request: control_pb2.StatusRequest,
        context: grpc.aio.ServicerContext[control_pb2.StatusRequest, control_pb2.JobStatus],
    ) -> control_pb2.JobStatus: ...
    async def Shutdown(
        self,
        request: control_pb2.ShutdownRequest,
        context: grpc.aio.ServicerContext[control_pb2.ShutdownRequest, control_pb2.ShutdownReply],
    ) -> control_pb2.ShutdownReply: ...

def add_ControlServicer_to_server(servicer: ControlServicer, server: grpc.aio.Server) -> None: ...
