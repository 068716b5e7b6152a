"""`python -m ckpt_tools`: the same as `ckpt`."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
