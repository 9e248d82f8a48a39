"""``python -m tfm_kernels <command>``."""

import sys

from .cli import main

sys.exit(main())
