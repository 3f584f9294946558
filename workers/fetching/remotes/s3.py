"""Folders of S3, and of stores that speak its API (`pip install 'ostinato[s3]'`).

The operator's environment alone names an endpoint (AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from workers.fetching.credentials import Credentials
from workers.fetching.messages import DENIED, NOT_FOUND, UNREADABLE, FetchError, Interrupted
from workers.fetching.remote_source import RemoteSource
from workers.fetching.remotes.interface import RemoteFile, existing, revision_of

PART_BYTES = 1 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_DENIED = ("AccessDenied", "401", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_ABSENT = ("NoSuchBucket", "NoSuchKey", "404")


@dataclass(frozen=True)
class S3Folder:
    bucket: str
    prefix: str  # empty, or with a slash at its end
    files: Mapping[str, RemoteFile]
    client: Any = field(repr=False)

    @classmethod
    def resolve(cls, source: RemoteSource, credentials: Credentials) -> Self:
        bucket, _, folder = source.name.partition("/")
        prefix = f"{folder}/" if folder else ""
        client = _client(credentials)
        files = {}
        with _named(source.uri):
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(prefix)
                    files[name] = RemoteFile(name, entry["Size"], tag=entry["ETag"].strip('"'))
        if not files:
            raise FetchError(NOT_FOUND, f"{source.uri} has no files; check bucket and folder")
        return cls(bucket, prefix, files, client)

    @property
    def revision(self) -> str:
        return revision_of(self.files.values())

    def names(self) -> Collection[str]:
        return self.files.keys()

    def find(self, names: Iterable[str]) -> list[RemoteFile]:
        return [self._with_digest(file) for file in existing(self.files, names, self._uri(""))]

    def _with_digest(self, file: RemoteFile) -> RemoteFile:
        with _named(self._uri(file.name)):
            head = self.client.head_object(
                Bucket=self.bucket, Key=self.prefix + file.name, ChecksumMode="ENABLED"
            )
        return with_digest_of(file, head)

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """`IfMatch`: an object that was replaced meanwhile is refused."""
        where = self._uri(file.name)
        with _named(where):
            answer = self.client.get_object(
                Bucket=self.bucket,
                Key=self.prefix + file.name,
                IfMatch=file.tag,
                **({"Range": f"bytes={start}-"} if start else {}),
            )
        body = answer["Body"]
        try:
            yield start, _parts(body, where)
        finally:
            body.close()

    def _uri(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{name}"


def with_digest_of(file: RemoteFile, head: Mapping[str, Any]) -> RemoteFile:
    """The file with the digest in the answer to HeadObject: a SHA-256 of the whole object, or its ETag.

    The ETag is an MD5 unless the object came in several parts or is encrypted with a key of its own.
    """
    etag = str(head.get("ETag") or "").strip('"')
    encryption = str(head.get("ServerSideEncryption") or "")
    own_key = head.get("SSECustomerAlgorithm") or encryption.startswith("aws:kms")
    md5 = etag if _MD5.fullmatch(etag) and not own_key else ""
    return replace(file, tag=etag, sha256=_hex(head.get("ChecksumSHA256")), md5=md5)


def _hex(text: Any) -> str:
    """A digest in base64 as hexadecimal digits; empty for none, and for the digest of an object's parts."""
    try:
        return base64.b64decode(str(text or ""), validate=True).hex()
    except ValueError:
        return ""


def _client(credentials: Credentials) -> Any:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as e:
        text = "s3:// needs boto3, which is not installed; pip install 'ostinato[s3]'"
        raise FetchError(UNREADABLE, text) from e
    keys = {
        "aws_access_key_id": credentials.s3.get("key"),
        "aws_secret_access_key": credentials.s3.get("secret"),
        "aws_session_token": credentials.s3.get("token"),
    }
    anonymous = not credentials.own and not credentials.s3
    config = Config(
        connect_timeout=10,
        read_timeout=30,
        retries={"total_max_attempts": 2},
        **({"signature_version": UNSIGNED} if anonymous else {}),
    )
    return boto3.client("s3", config=config, **{name: value for name, value in keys.items() if value})


def _parts(body: Any, where: str) -> Iterator[bytes]:
    with _named(where):
        while data := body.read(PART_BYTES):
            yield data


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors of S3 by name. Their texts may have signatures, so they are not used."""
    from botocore import exceptions as aws

    try:
        yield
    except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.TokenRetrievalError):
        raise _denied(where) from None
    except aws.ClientError as e:
        code = str(e.response.get("Error", {}).get("Code", ""))
        if code in _DENIED:
            raise _denied(where) from None
        if code in _ABSENT:
            raise FetchError(NOT_FOUND, f"{where} does not exist; check bucket and folder") from None
        if code in ("PreconditionFailed", "412"):
            text = f"{where} changed while it was fetched; register it again"
            raise FetchError(UNREADABLE, text) from None
        raise Interrupted(f"{where}: {code[:40]}") from None
    except (aws.BotoCoreError, OSError) as e:
        raise Interrupted(f"{where}: {type(e).__name__}") from None


def _denied(where: str) -> FetchError:
    return FetchError(DENIED, f"{where} refuses access; give credentials that may read it")
