"""S3 and what speaks its language, through the client of s3fs: as few requests as there can be,
each tried again.

* Listings are asked of the server every time; s3fs's cache of them is not used.
* A small object is one put, create-only (`If-None-Match: *`): of two jobs that write one key, one
gets EEXIST. Where a
  server does not know that (501), the key is looked at before.
* A large object is a multipart upload. Its key is looked at before, and completing it
is create-only too.
* An object carries a random name of the write that made it, so that a put whose answer was lost is
known for ours.
* A read is a range request pinned to the version that was opened (`If-Match`), streamed into its
destination; where the
  connection breaks, the next request asks for what is missing.
* Requests go through loops of our own: two of them, since one thread cannot sign or encrypt as fast
as can be sent.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import secrets
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import fsspec
import numpy as np
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import BytesPayload, Order, payload_type
from fsspec.asyn import sync

from ..errors import StorageError
from .base import Entry, FileReader, FileWriter
from .remote import PIECE_BYTES, FsspecStorage, translating, version_in
from .retry import http_code

T = TypeVar("T")

REMOVED_AT_ONCE = 1000  # keys that one request deletes
READ_AT_ONCE = 16  # range requests under way for one storage
# How long a server may take to let us in, to answer, and to take up the next piece of what is sent
# to it.
CONNECT_SECONDS, READ_SECONDS, SEND_SECONDS = 5.0, 15.0, 30.0
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
class _PartPayload(BytesPayload):
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


# What one request may have a server copy (S3: 5 GiB).
COPIED_AT_ONCE = 5 << 30


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


class S3Storage(FsspecStorage):
    """`options` are those of s3fs (endpoint_url, key, secret, ...), and `retry_deadline`."""

    request_bytes = PIECE_BYTES

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(url, options)
        if not self.root:
            what = f"{self.url} names no bucket; pass s3://bucket/folder"
            raise StorageError(what, path=self.url, errno=errno.EINVAL)
        self.create_only = True
        self.buffers = PartBuffers(patience=max(1.0, min(self._retries.seconds, SEND_SECONDS)))
        self.requests = 0  # that were sent, tries included
        self._counting = threading.Lock()
        self._reading: asyncio.Semaphore | None = None

    def _connect(self) -> tuple[Any, str]:
        # A server that takes a connection and is silent has failed, too.
        patience = max(1.0, min(self._retries.seconds, READ_SECONDS))
        timeouts = {"connect_timeout": min(patience, CONNECT_SECONDS), "read_timeout": patience}
        config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 50, **timeouts}
        config |= self._options.get("config_kwargs") or {}
        # Parts are signed, encrypted and sent in two threads, each with a client of its own; the
        # first one does all else. A `session` that is given belongs to one of them.
        self._senders = []
        for number in range(1 if self._options.get("session") else 2):
            options = {**self._options, "config_kwargs": config, "loop": _loop(os.getpid(), number)}
            fs, root = fsspec.core.url_to_fs(self._opened, **options)
            # What s3fs itself would do; the instance is shared by those alone who give the options
            # above.
            fs.retries = 1
            self._senders.append(fs)
        self._reading = None
        return self._senders[0], root

    def location(self, path: str) -> dict[str, str]:
        bucket, _, prefix = self.root.partition("/")
        return {"Bucket": bucket, "Key": f"{prefix}/{path}" if prefix else path}

    def _prefix(self, path: str) -> dict[str, str]:
        bucket, key = self.location(path).values()
        return {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/".removeprefix("/")}

    async def ask(self, method: str, sender: Any = None, **parameters: Any) -> Any:
        """One request, once."""
        with self._counting:
            self.requests += 1
        try:
            return await (sender or self.fs)._call_s3(method, **parameters)
        except FileNotFoundError as error:
            if http_code(error)[1] != "NoSuchBucket":
                raise
            # No run can ever have been there, nor begin.
            what = f"there is no bucket {parameters['Bucket']} (NoSuchBucket)"
            raise OSError(errno.ENXIO, what) from error

    async def request(self, method: str, sender: Any = None, **parameters: Any) -> Any:
        """One request, tried again while it fails for the moment."""
        return await self._retries.run_async(lambda: self.ask(method, sender, **parameters))

    def begin(self, turn: int, method: str, **parameters: Any) -> Future[Any]:
        """`request` in the background; `turn` says by which of the threads that send."""
        sender = self._senders[turn % len(self._senders)]
        return asyncio.run_coroutine_threadsafe(
            self.request(method, sender, **parameters), sender.loop
        )

    @property
    def sends_checksums(self) -> bool:
        """Whether the client sends one with what it writes unless told otherwise; not every server
        takes them."""
        client = self.fs._s3
        how = getattr(client.meta.config, "request_checksum_calculation", None) if client else None
        return how == "when_supported"

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of a coroutine, from any thread."""
        result: T = sync(self.fs.loop, work)
        return result

    def _request(self, method: str, **parameters: Any) -> Any:
        return self.wait_for(lambda: self.request(method, **parameters))

    def create(self, path: str, size: int) -> FileWriter:
        with translating(self, path, "creating the object"):
            if (size > PIECE_BYTES or not self.create_only) and self.head(path) is not None:
                raise FileExistsError(errno.EEXIST, "it exists")
        return _UploadWriter(self, path, size)

    def head(self, path: str) -> dict[str, Any] | None:
        """What is known of an object; None when there is none."""
        try:
            found: dict[str, Any] = self._request("head_object", **self.location(path))
        except FileNotFoundError:
            return None
        return found

    def wrote(self, path: str, write: str) -> bool:
        """Whether the object at `path` is what the write of that name has made."""
        found = self.head(path)
        return found is not None and found.get("Metadata", {}).get(WRITTEN_BY) == write

    def open(self, path: str) -> FileReader:
        with translating(self, path, "opening the object"):
            found = self.head(path)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such object")
            return _Reader(self, path, int(found["ContentLength"]), found["ETag"])

    def read(self, path: str, limit: int = 1 << 30) -> bytes:
        """One request: without asking for the size before."""

        async def fetch() -> bytes:
            found = await self.ask("get_object", **self.location(path))
            size = found["ContentLength"]
            async with found["Body"] as body:
                if size > limit:
                    what = (
                        f"{self.at(path)} has {size:,} bytes, more than the {limit:,} expected at "
                        "most"
                    )
                    raise StorageError(what, path=path, errno=errno.EFBIG)
                data: bytes = await body.read()
            if len(data) != size:
                raise ConnectionError(f"{len(data)} bytes came of {size}")
            return data

        with translating(self, path, "reading"):
            return self.wait_for(lambda: self._retries.run_async(fetch))

    def list(self, path: str = "") -> list[Entry]:
        with translating(self, path, "listing"):
            where = self._prefix(path)
            entries = {}
            for item in self._listed({**where, "Delimiter": "/"}):
                if "Prefix" in item:
                    name = item["Prefix"][len(where["Prefix"]) :].rstrip("/")
                    entries[name] = Entry(name, True, None)
                # A key that ends in "/" is how some programs say that there is a folder.
                elif name := item["Key"][len(where["Prefix"]) :]:
                    entries.setdefault(
                        name, Entry(name, False, int(item["Size"]), version_in(item))
                    )
            if not entries:
                raise FileNotFoundError(errno.ENOENT, "nothing there")
        return [entries[name] for name in sorted(entries)]

    def list_folders(self, beginning: str) -> dict[str, Sequence[Entry] | None]:
        found: dict[str, dict[str, Entry]] = {}
        with translating(self, "", "listing"):
            where = self._prefix("")
            for item in self._listed({**where, "Prefix": where["Prefix"] + beginning}):
                folder, slash, name = item["Key"][len(where["Prefix"]) :].partition("/")
                name, deeper, _ = name.partition("/")
                if slash and name:
                    entry = (
                        Entry(name, True, None)
                        if deeper
                        else Entry(name, False, int(item["Size"]), version_in(item))
                    )
                    found.setdefault(folder, {})[name] = entry
        return {
            folder: [inside[name] for name in sorted(inside)]
            for folder, inside in sorted(found.items())
        }

    def _listed(self, where: dict[str, str]) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._request("list_objects_v2", **where, **more)
            yield from page.get("CommonPrefixes", ())
            yield from page.get("Contents", ())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def make_folder(self, path: str) -> None:
        pass  # folders are what the keys say

    def rename(self, source: str, target: str) -> None:
        with translating(self, target, f"renaming {source}"):
            self._request("copy_object", CopySource=self.location(source), **self.location(target))
            self._request("delete_object", **self.location(source))

    def identity(self, path: str) -> str | None:
        with translating(self, path, "asking for the object"):
            found = self.head(path)
        return None if found is None else f"{found['ETag']} {found['ContentLength']}"

    def link(self, source: str, target: str, identity: str) -> bool:
        """A copy that the server makes; of parts, where one copy may not be so large."""
        tag, _, length = identity.rpartition(" ")
        where = {"CopySource": self.location(source), "CopySourceIfMatch": tag}
        # Asked here, too, because not every server minds the condition.
        if self.identity(source) != identity:
            return False
        with translating(self, target, f"copying {source}"):
            if self.head(target) is not None:
                raise FileExistsError(errno.EEXIST, "it exists")
            try:
                if int(length) <= COPIED_AT_ONCE:
                    self._request("copy_object", **where, **self.location(target))
                else:
                    self._copy_parts(where, target, int(length))
            except OSError as error:
                if isinstance(error, FileNotFoundError) or "precondition" in str(error).lower():
                    return False  # it went, or became another one, just now
                raise
        return True

    def _copy_parts(self, where: dict[str, Any], target: str, length: int) -> None:
        upload = self._request("create_multipart_upload", **self.location(target))
        begun = {**self.location(target), "UploadId": upload["UploadId"]}
        try:
            parts = []
            for number, start in enumerate(range(0, length, COPIED_AT_ONCE), 1):
                end = min(start + COPIED_AT_ONCE, length) - 1
                copied = self._request(
                    "upload_part_copy",
                    PartNumber=number,
                    CopySourceRange=f"bytes={start}-{end}",
                    **where,
                    **begun,
                )
                parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
            self._request("complete_multipart_upload", MultipartUpload={"Parts": parts}, **begun)
        except BaseException:
            with suppress(OSError):
                self._request("abort_multipart_upload", **begun)
            raise

    def remove(self, path: str) -> None:
        with translating(self, path, "removing the object"):
            self._request("delete_object", **self.location(path))

    def remove_all(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), REMOVED_AT_ONCE):
            some = paths[at : at + REMOVED_AT_ONCE]
            objects = [{"Key": self.location(path)["Key"]} for path in some]
            with translating(self, some[0], f"removing {len(some)} objects"):
                answer = self._request(
                    "delete_objects",
                    Bucket=self.location("")["Bucket"],
                    Delete={"Objects": objects, "Quiet": True},
                )
            # Alone, so that it is tried again, or the error is the key's own.
            refused = {each["Key"] for each in answer.get("Errors", ())}
            for path in some:
                if self.location(path)["Key"] in refused:
                    self.remove(path)

    def remove_folder(self, path: str) -> None:
        """There is none; but what was begun to be uploaded below a prefix that is empty now, nobody
        will finish."""
        with translating(self, path, "removing the folder"):
            begun = self._begun(path)
            if begun and not self._request("list_objects_v2", **self._prefix(path), MaxKeys=1).get(
                "Contents"
            ):
                self._give_up(begun)

    def drop_uploads(self, path: str) -> None:
        with translating(self, path, "giving up uploads"):
            self._give_up(self._begun(path))

    def _begun(self, path: str) -> Any:
        """Uploads below a prefix that are not complete."""
        found: Any = []
        more: dict[str, Any] = {}
        try:
            while True:
                page = self._request("list_multipart_uploads", **self._prefix(path), **more)
                found += page.get("Uploads", [])
                if not page.get("IsTruncated"):
                    return found
                more = {
                    "KeyMarker": page["NextKeyMarker"],
                    "UploadIdMarker": page["NextUploadIdMarker"],
                }
        except (FileNotFoundError, PermissionError, NotImplementedError):
            return []  # not everybody may ask for that

    def _give_up(self, uploads: Sequence[dict[str, Any]]) -> None:
        bucket = self.location("")["Bucket"]
        for upload in uploads:
            with suppress(FileNotFoundError, PermissionError):
                self._request(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )

    def range_slots(self) -> asyncio.Semaphore:
        """How many range requests may be under way; to be asked for in the loop."""
        if self._reading is None:
            self._reading = asyncio.Semaphore(READ_AT_ONCE)
        return self._reading


class _Threads(ThreadPoolExecutor):
    """Where a loop looks up the names of hosts. At the end of a program, while saves in the
    background go on, executors
    refuse: then it is done at once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)
            return done


class _Loop(asyncio.SelectorEventLoop):
    name = ""

    def __repr__(self) -> str:
        """By which fsspec tells filesystems apart; for others of the same options it has one
        instance."""
        return self.name


@cache
def _loop(process: int, number: int) -> asyncio.AbstractEventLoop:
    """A loop in a thread of its own: the same for all storages of a process, for as long as it
    lives."""
    loop = _Loop()
    loop.name = f"ckptcore-s3-{number}"
    loop.set_default_executor(_Threads())
    threading.Thread(target=loop.run_forever, name=loop.name, daemon=True).start()
    return loop


class _UploadWriter(FileWriter):
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
                size = min(self.part_bytes, self.size - self.at)
                self.part, self.filled = self.storage.buffers.take(size), 0
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


class _Reader(FileReader):
    def __init__(self, storage: S3Storage, path: str, size: int, etag: str) -> None:
        self.storage, self.path, self.size, self.etag = storage, path, size, etag

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        need = sum(len(b) for b in buffers)
        with translating(self.storage, self.path, "reading"):
            if offset + need > self.size:
                raise OSError(errno.EIO, "the object ends too early")
            ranges = list(_ranges(offset, [b.cast("B") for b in buffers if len(b)]))
            if ranges:
                self.storage.wait_for(lambda: self._all(ranges))

    async def _all(self, ranges: list[tuple[int, list[memoryview]]]) -> None:
        tasks = [asyncio.ensure_future(self._range(start, buffers)) for start, buffers in ranges]
        try:
            await asyncio.gather(*tasks)
        finally:
            # The buffers are the caller's again when this returns.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _range(self, start: int, buffers: list[memoryview]) -> None:
        left = buffers
        stop = start + sum(len(b) for b in buffers)

        async def fetch() -> None:
            """What is still missing. What has come by the time of a failure need not come again."""
            nonlocal start, left
            found = await self.storage.ask(
                "get_object",
                **self.storage.location(self.path),
                Range=f"bytes={start}-{stop - 1}",
                IfMatch=self.etag,
            )
            async with found["Body"] as body:
                if not str(found.get("ContentRange", "")).startswith(f"bytes {start}-{stop - 1}/"):
                    raise OSError(
                        errno.EPROTO,
                        f"asked for a range, the server sent {found.get('ContentRange')!r}",
                    )
                while start < stop and (data := memoryview(await body.read(stop - start))):
                    start += len(data)
                    while data:
                        taken = min(len(data), len(left[0]))
                        left[0][:taken] = data[:taken]
                        data = data[taken:]
                        left = [left[0][taken:], *left[1:]] if taken < len(left[0]) else left[1:]
            if start < stop:
                raise ConnectionError(f"the answer ended {stop - start} bytes early")

        async with self.storage.range_slots():
            await self.storage._retries.run_async(fetch)

    def close(self) -> None:
        pass


def _ranges(offset: int, buffers: list[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """The range cut into requests: where each begins, and the buffers that it fills."""
    total = sum(len(b) for b in buffers)
    count = -(-total // PIECE_BYTES)
    size = -(-total // count) if count else 0
    mine: list[memoryview] = []
    start, have = offset, 0
    for buffer in buffers:
        while buffer:
            part = buffer[: size - have]
            mine.append(part)
            have += len(part)
            buffer = buffer[len(part) :]
            if have == size:
                yield start, mine
                start, have, mine = start + have, 0, []
    if mine:
        yield start, mine
