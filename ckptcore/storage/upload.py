"""Writing one object to S3: one put, or parts that are uploaded side by side while the next one is
filled.

Nothing is found under the key before everything is there: that is what completing an upload means.
Memory is bounded: all writers of a storage share PartBuffers, and wait for one to come free.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import secrets
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import BytesPayload, Order, payload_type

from .base import FileWriter
from .remote import PIECE_BYTES, translating
from .retry import http_code

if TYPE_CHECKING:
    from .s3 import S3Storage

__all__ = ["PartBuffers", "UploadWriter"]

BUFFERED_BYTES = 96 << 20
MOST_PARTS = 10_000
SEND_BYTES = 1 << 20
WRITTEN_BY = "ckptcore-write"


class Part(bytearray):
    """The bytes of a part. Of a plain bytearray what does not fit into the connection's buffer is
    copied three times.

    patience: seconds within which the server must take SEND_BYTES.
    """

    patience = 30.0


@payload_type(Part, order=Order.try_first)
class _Pieces(BytesPayload):
    """How aiohttp sends a Part: straight from its memory, SEND_BYTES at a time. Its own time limits
    begin when all is sent, so that a server which stops reading would be waited for without end."""

    def __init__(self, value: Part, *args: Any, **kwargs: Any) -> None:
        # Past the constructor in between, which warns that large bodies hold up the loop: as
        # aiohttp sends them, they do.
        kwargs.setdefault("content_type", "application/octet-stream")
        super(BytesPayload, self).__init__(value, *args, **kwargs)
        self._size, self.patience = len(value), value.patience

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        with memoryview(self._value)[:content_length] as view:
            for at in range(0, len(view), SEND_BYTES):
                await asyncio.wait_for(writer.write(view[at : at + SEND_BYTES]), self.patience)


class PartBuffers:
    """Memory for parts, `limit` bytes of it, or one part when that is larger. Used again, since new
    memory is slow; given back when nobody writes."""

    def __init__(self, limit: int = BUFFERED_BYTES, patience: float = Part.patience) -> None:
        self.limit, self.patience = limit, patience
        self._changed = threading.Condition()
        self._used = 0
        self._free: list[Part] = []

    def take(self, size: int) -> Part:
        """A buffer of exactly `size` bytes; waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self.limit)
            self._used += size
            for number, buffer in enumerate(self._free):
                if len(buffer) == size:
                    return self._free.pop(number)
        part = Part(size)
        part.patience = self.patience
        return part

    def give(self, buffer: Part) -> None:
        with self._changed:
            self._used -= len(buffer)
            if len(buffer) == PIECE_BYTES:
                self._free.append(buffer)
            if not self._used:
                self._free.clear()
            self._changed.notify_all()


class UploadWriter(FileWriter):
    """Takes bytes in order. `write` is a random name that the object carries: whoever finds it
    knows who wrote it."""

    def __init__(self, storage: S3Storage, path: str, size: int) -> None:
        self.storage, self.path, self.size = storage, path, size
        self.location, self.write = storage.location(path), secrets.token_hex(12)
        self.part_bytes = max(PIECE_BYTES, -(-size // MOST_PARTS))
        self.at = 0
        self.part: Part | None = None
        self.filled = 0
        self.upload: str | None = None
        self.sent: list[Future[dict[str, Any]]] = []
        # "refused": what is under the key is another's. "asked": it may be ours. "done": it is.
        self.state = "open"

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translating(self.storage, self.path, "writing"):
            if offset != self.at or self.state != "open":
                raise OSError(errno.EINVAL, f"byte {offset} was given, byte {self.at} is next")
            for buffer in buffers:
                self._take(memoryview(buffer).cast("B"))

    def _take(self, data: memoryview) -> None:
        if self.at + len(data) > self.size:
            raise OSError(errno.EINVAL, f"more than the {self.size:,} bytes that were announced")
        while data:
            if self.part is None:
                self.part, self.filled = (
                    self.storage.buffers.take(min(self.part_bytes, self.size - self.at)),
                    0,
                )
            count = min(len(data), len(self.part) - self.filled)
            # By numpy, which lets other threads run meanwhile: those that sign and send.
            np.copyto(
                np.frombuffer(self.part, np.uint8, count, self.filled),
                np.frombuffer(data, np.uint8, count),
            )
            self.filled += count
            self.at += count
            data = data[count:]
            if self.filled == len(self.part) and self.size > self.part_bytes:
                self._send()

    def _send(self) -> None:
        """Begin to upload the part that is full."""
        for future in self.sent:
            if future.done():
                future.result()  # no more of what will never be whole
        if self.upload is None:
            self.upload = self.storage.wait_for(self._begin)
        part, self.part = self.part, None
        assert part is not None
        number = len(self.sent) + 1
        where = {**self.location, "UploadId": self.upload, "PartNumber": number}
        future = self.storage.begin(
            number, "upload_part", **where, Body=part, **self._checksum(part)
        )
        # Also where it is cancelled before it has begun.
        future.add_done_callback(lambda _: self.storage.buffers.give(part))
        self.sent.append(future)

    def _checksum(self, data: bytes | bytearray) -> dict[str, str]:
        """What the client would compute by itself, in a thread that sends."""
        if not self.storage.sends_checksums:
            return {}
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}

    async def _begin(self) -> str:
        made = await self.storage.request(
            "create_multipart_upload", **self.location, Metadata={WRITTEN_BY: self.write}
        )
        return str(made["UploadId"])

    def close(self) -> None:
        with translating(self.storage, self.path, "completing the object"):
            if self.at != self.size:
                raise OSError(errno.EINVAL, f"{self.at:,} bytes were written of {self.size:,}")
            if self.size <= self.part_bytes:
                body = self.part or b""
                self._publish(
                    "put_object",
                    {"Body": body, "Metadata": {WRITTEN_BY: self.write}, **self._checksum(body)},
                )
            else:
                parts = [
                    {"PartNumber": n, "ETag": part.result()["ETag"]}
                    for n, part in enumerate(self.sent, 1)
                ]
                whole = {"UploadId": self.upload, "MultipartUpload": {"Parts": parts}}
                self._publish("complete_multipart_upload", whole)
            self._give_back()

    def _publish(self, method: str, parameters: dict[str, Any]) -> None:
        """The one request with which the object appears, create-only."""
        storage = self.storage
        if storage.create_only:
            parameters = {**parameters, "IfNoneMatch": "*"}
        self.state = "asked"
        try:
            storage.wait_for(lambda: storage.request(method, **self.location, **parameters))
        except Exception as error:
            status, code = http_code(error)
            if status == 501 and storage.create_only:
                # It does not know the condition. From here on the key is looked at before.
                storage.create_only = False
                self.state = "open"
                if storage.head(self.path) is not None:
                    self.state = "refused"
                    raise FileExistsError(errno.EEXIST, "it exists") from None
                self._publish(
                    method,
                    {name: value for name, value in parameters.items() if name != "IfNoneMatch"},
                )
                return
            # The first answer may have been lost: then the request was done, and what is found
            # there is ours.
            if (status == 412 or code == "NoSuchUpload") and not storage.wrote(
                self.path, self.write
            ):
                self.state = "refused"
                if status == 412:
                    raise FileExistsError(errno.EEXIST, "it exists") from None
                raise
            if status != 412 and code != "NoSuchUpload":
                raise
        self.state = "done"

    def _give_back(self) -> None:
        part, self.part = self.part, None
        if part is not None:
            self.storage.buffers.give(part)

    def abort(self) -> None:
        storage = self.storage
        self._give_back()
        for future in self.sent:
            future.cancel()
        for future in self.sent:
            with suppress(BaseException):
                future.result()
        if storage._retries.dead:
            # nobody answers; what was begun is removed with the folder of the attempt, later
            return
        with suppress(OSError), translating(storage, self.path, "giving up the upload of"):
            if self.state == "done" or (
                self.state == "asked" and storage.wrote(self.path, self.write)
            ):
                storage.remove(self.path)
            elif self.upload is not None:
                with suppress(FileNotFoundError):
                    storage.wait_for(
                        lambda: storage.request(
                            "abort_multipart_upload", **self.location, UploadId=self.upload
                        )
                    )
        self.state, self.upload = "open" if self.state == "open" else "refused", None
