"""Digests: xxh3 of chunks, combined into the digests of tensors and files.

Every byte is hashed once. Tensor bytes are hashed in chunks of 4 MiB (xxh3-64, so that chunks can
be hashed and checked in parallel and in any order); the digest of a tensor is the xxh3-128 of its
ordered chunk digests, that of a tensor file the xxh3-128 of its header's digest and the chunk
digests in file order. xxh3 detects damage, not malice: whoever can change the data can change the
digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

Buffer = bytes | bytearray | memoryview

CHUNK_BYTES = 4 * 1024 * 1024
DIGEST_BYTES = 8

# 8 bytes, big-endian: xxh3-64 of one chunk. Releases the GIL.
chunk_digest: Callable[[Buffer], bytes] = xxhash.xxh3_64_digest
# 16 bytes, and the same as 32 hex digits: xxh3-128 of what manifests record for whole files.
content_hash: Callable[[Buffer], bytes] = xxhash.xxh3_128_digest
content_digest: Callable[[Buffer], str] = xxhash.xxh3_128_hexdigest


def combined_digest(parts: Iterable[bytes]) -> str:
    """32 hex digits: xxh3-128 of the concatenation of digests, in order."""
    return content_digest(b"".join(parts))
