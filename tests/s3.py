"""A real S3 server (moto's, in a process of its own), and a proxy before it that cuts connections and answers errors."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

from tests.ports import free_port
from tests.waiting import until

BUCKET = "jobs"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "test/secret/key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Proxy:
    """Forwards connections to a server; each one is given up after so many bytes from the client where `cut_after` says so."""

    port: int
    target: int
    cut_after: list[int] = field(default_factory=list)
    """For the next connections that carry so many bytes of a part: bytes after which they are cut. A connection that its client gives up before
    takes none from the front."""
    answer_cuts: int = 0
    """So many answers are cut after a megabyte."""
    refusals: int = 0
    """So many requests get a 503."""
    down: bool = False
    cuts: int = 0
    refused: int = 0
    hold_after: int | None = None
    """Nothing more is forwarded from the clients after so many bytes in all, until it is None again."""
    carried: int = 0
    _more: threading.Condition = field(default_factory=threading.Condition)
    _counts: threading.Lock = field(default_factory=threading.Lock)
    """Held while one of several connections looks whether it is the one to be cut or refused."""

    def release(self) -> None:
        with self._more:
            self.hold_after = None
            self._more.notify_all()

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self.down:
                return
            with socket.create_connection(("127.0.0.1", self.target)) as server:
                answers = threading.Thread(target=self._pump, args=(server, client), daemon=True)
                answers.start()
                seen, carries_part = 0, False
                while data := client.recv(1 << 16):
                    if self.down:
                        break
                    if data.split(b" ", 1)[0] in (b"PUT", b"POST") and self._refuses():
                        client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                        break
                    carries_part = carries_part or b"partNumber=" in data
                    seen += len(data)
                    if carries_part and self._cuts(seen):
                        break
                    with self._more:
                        self.carried += len(data)
                        self._more.wait_for(lambda: self.hold_after is None or self.carried <= self.hold_after, 120)
                    server.sendall(data)
                for each in (server, client):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def _refuses(self) -> bool:
        with self._counts:
            refuses = self.refusals > 0
            self.refusals, self.refused = self.refusals - refuses, self.refused + refuses
            return refuses

    def _cuts(self, seen: int) -> bool:
        with self._counts:
            if cuts := bool(self.cut_after) and seen > self.cut_after[0]:
                del self.cut_after[0]
                self.cuts += 1
            return cuts

    def _cuts_answer(self) -> bool:
        with self._counts:
            cuts = self.answer_cuts > 0
            self.answer_cuts -= cuts
            return cuts

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        seen, how = 0, socket.SHUT_WR
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen += len(data)
                if seen > 1 << 20 and self._cuts_answer():
                    how = socket.SHUT_RDWR
                    break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(how)


@dataclass
class S3:
    """A server with one bucket, by way of a proxy."""

    proxy: Proxy
    server_port: int

    @property
    def environ(self) -> dict[str, str]:
        """What a client needs."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}"}

    def client(self) -> Any:
        """Return a client of the server itself."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.server_port}",
            region_name="us-east-1",
            aws_access_key_id="test-key-id",
            aws_secret_access_key="test/secret/key",
        )

    def keys(self, prefix: str = "") -> list[str]:
        return [each["Key"] for each in self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]

    def uploads(self) -> list[str]:
        """Return the keys of multipart uploads that are not complete."""
        return [each["Key"] for each in self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def put(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=BUCKET, Key=key)


@contextlib.contextmanager
def serving() -> Iterator[S3]:
    """Run a server, its bucket empty."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _answers(port), "the S3 server", within_s=120)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                proxy = Proxy(listener.getsockname()[1], port)
                threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
                found = S3(proxy, port)
                found.client().create_bucket(Bucket=BUCKET)
                yield found
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5):
            return True
    except OSError:
        return False
