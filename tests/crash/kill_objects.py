"""Where kill_points.py puts and resets what it saves to S3."""

import json
import os


class Objects:
    """A place on the server, through a client without threads: the process that uses it will
    fork."""

    def __init__(self, name: str) -> None:
        import boto3

        url, self.options = json.loads(os.environ["KILL_S3"])
        self.url = f"{url}/{name}"
        self.bucket, _, self.prefix = self.url.removeprefix("s3://").partition("/")
        self.client = boto3.client(
            "s3",
            endpoint_url=self.options["endpoint_url"],
            region_name="us-east-1",
            aws_access_key_id=self.options["key"],
            aws_secret_access_key=self.options["secret"],
        )

    def keys(self, below: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}/{below}")
        return [item["Key"] for item in found.get("Contents", ())]

    def copy(self, source: str, target: str) -> None:
        """Make `target` the same as `source`."""
        for key in self.keys(target):
            self.client.delete_object(Bucket=self.bucket, Key=key)
        for key in self.keys(source):
            to = key.replace(f"{self.prefix}/{source}", f"{self.prefix}/{target}", 1)
            self.client.copy_object(
                Bucket=self.bucket, CopySource={"Bucket": self.bucket, "Key": key}, Key=to
            )
