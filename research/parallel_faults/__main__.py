"""``python -m research.parallel_faults``: plants mistakes into the graphs of small clusters, or into sources, and prints what the
check says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the cases asked for; ends with 0 whatever they say."""
    parser = argparse.ArgumentParser(prog="python -m research.parallel_faults", description=__doc__)
    parser.add_argument("--only", default="", help="regular expression that names of cases must hold")
    parser.add_argument("--forms", nargs="*", help="forms to plant mistakes into (default: nine small ones)")
    parser.add_argument("--correct", action="store_true", help="correct variations in place of mistakes")
    parser.add_argument("--sources", action="store_true", help="mistakes in a copy of the sources (sources.yaml)")
    parser.add_argument("--cache", type=Path, help="where compiled graphs are kept (default: as for the check)")
    parser.add_argument("--json", type=Path, help="file that rows are written to, each with the whole answer")
    parser.add_argument("--markdown", type=Path, help="file that the table by kinds is written to")
    options = parser.parse_args()
    os.environ.setdefault("GLOG_v", "3")
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from research.parallel_faults import bench, sources

    cache = options.cache or cache_directory()
    told = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    if options.sources:
        cases = sources.edit_rows(options.only, told)
    elif options.correct:
        cases = bench.variation_rows(options.only, cache, told)
    else:
        cases = bench.fault_rows(options.forms or bench.FORMS, options.only, cache, told)
    rows = []
    for row in cases:
        rows.append(row)
        word = "located" if row.located else "NOT LOCATED" if row.what else "FALSE ALARM"
        first = row.where.splitlines()[0] if row.where else ""
        print(f"{row.name}: {row.found_by or 'nothing found'}, {word}, {row.seconds:.1f} s  {first}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(bench.as_json(rows), indent=1), encoding="utf-8")
        if options.markdown:
            options.markdown.write_text("\n".join(bench.markdown(rows)) + "\n", encoding="utf-8")
    print("\n".join(bench.summary(rows)))


if __name__ == "__main__":
    main()
