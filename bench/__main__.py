"""python -m bench: proves and times every kernel beside its peers, and writes bench/results/<device>/<op>.json.

python -m bench                        the whole grid, about 15 minutes on 2 cores
python -m bench --op attention --quick a few cases of one op, in a minute; results stay out of the repository
python -m bench --only "T512.*causal"  the groups whose name matches

An interrupted run is continued by the same command, as long as sources, torch and machine are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tfm_kernels.bench import grid

from . import places


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    grid.declare(parser, "bench/results/<device>")
    try:
        return grid.run(parser.parse_args(arguments), places.RESULTS, places.QUICK_RESULTS, "python -m bench.report")
    except grid.GridError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
