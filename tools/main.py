"""The process of `ckpt`: from words to an exit code (docs/cli.md lists both)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE, STORAGE, INTERRUPTED, BROKEN_PIPE = 2, 4, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. No traceback for anything that a user can
    cause."""
    # Who has closed them wants to hear nothing.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        # Imported here, so that Ctrl-C is answered while that takes its time.
        from .cli import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("ckpt: interrupted\n")
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in ("click", "jinja2"):
            raise
        sys.stderr.write(
            f"ckpt: the package {error.name} is missing: pip install 'ckptcore[cli]'\n"
        )
        return USAGE
    except OSError as error:
        # Standard output cannot be written. Python flushes it once more at exit; give that
        # somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        sys.stderr.write(f"ckpt: cannot write the output: {error.strerror}\n")
        return STORAGE


if __name__ == "__main__":
    sys.exit(main())
