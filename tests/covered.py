"""Print how many branches the tests took, and each module below 90%.

    coverage run -m pytest && coverage combine && coverage json && python tests/covered.py coverage.json

Lines and branches count together, as ``coverage report`` counts them. ``.ci/run coverage`` runs this.
"""

import json
import sys

LOW = 90.0


def below(files):
    """Yield the path and the percentage of each module below ``LOW``, the lowest first."""
    percent = {path: entry["summary"]["percent_covered"] for path, entry in files.items()}
    for path in sorted(percent, key=percent.get):
        if percent[path] < LOW:
            yield path, percent[path]


def main(path):
    with open(path) as file:
        report = json.load(file)
    totals, low = report["totals"], list(below(report["files"]))
    print(
        f"{totals['covered_branches']} of {totals['num_branches']} branches, "
        f"{totals['covered_lines']} of {totals['num_statements']} lines: "
        f"{totals['percent_covered']:.1f}%; {len(low)} of {len(report['files'])} modules "
        f"below {LOW:.0f}%"
    )
    for name, percent in low:
        print(f"  {percent:5.1f}%  {name}")


if __name__ == "__main__":
    main(sys.argv[1])
