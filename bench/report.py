"""What the results say: tables, the cases where automatic choice loses, and those where it took PyTorch.

python -m bench.report             the tables of bench/results
python -m bench.report --quick     those of the last `python -m bench --quick`
python -m bench.report --readme    rewrites the tables of README.md and bench/RESULTS.md between their markers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfm_kernels.bench import record
from tfm_kernels.bench.report import render

from . import places, readme


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where the result files lie, such as bench/results/cpu")
    parser.add_argument("--quick", action="store_true", help="read what `python -m bench --quick` wrote")
    parser.add_argument("--readme", action="store_true", help="rewrite the tables in README.md and RESULTS.md")
    options = parser.parse_args(arguments)
    if options.readme:
        print("rewritten:", ", ".join(readme.rewrite()) or "nothing, all was up to date")
        return 0
    folder = options.folder or (places.QUICK_RESULTS if options.quick else places.RESULTS) / "cpu"
    results = record.load(folder)
    if not results:
        print(f"bench.report: {folder} holds no results; `python -m bench` measures them", file=sys.stderr)
        return 1
    print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
