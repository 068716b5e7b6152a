"""`ckpt`: looks at checkpoints, compares, copies, converts, mends and deletes them (docs/cli.md).

Exit codes: 0 good; 1 bad (damaged, uncommitted, newer format, problems found); 2 usage; 3 not
found; 4 storage error (permission, unreachable); 130 interrupted; 141 the reader of the output went
away. Errors are one line on stderr, or with --json one object on stdout: {"error": {"kind",
"message", "exit_code", ...}}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE, STORAGE, INTERRUPTED, BROKEN_PIPE = 2, 4, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. No traceback for anything that a user can
    cause."""
    try:
        # Imported here, so that Ctrl-C is answered while that takes its time.
        from .cli import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("ckpt: interrupted\n")
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
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
