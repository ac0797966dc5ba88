"""What compute-sanitizer printed, errors and their places, and what follows from it.

A report is a headline behind "========= " and details indented under it, of which one names a place, such as
`at kernel(int *)+0x70 in file.py:41`. racecheck names two places: a headline with the first, then one detail for each
access that races with it, with the number of hazards.
"""

import re
from collections import Counter

# What a run's verdict is where the tool is silent, and where it is not.
_VERDICTS = {"kernel": ("clean", "errors"), "planted": ("not seen", "seen"), "control": ("clean", "false alarm")}
_LIMIT = 300
# Headlines that report no error.
_NOT_REPORTS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")
_HEADLINE = re.compile(r"=========? (?=\S)(.*)")
_DETAIL = re.compile(r"=========? {2,}(.*)")
_PLACE = re.compile(r"(?P<name>.+)\+(?P<offset>0x[0-9a-f]+)(?: in (?P<source>.+:\d+))?$")
_RACE = re.compile(r"(?:\w+: )?Race reported between (\w+) access at (.*)")
_RACES_WITH = re.compile(r"and (\w+) access at (.*?)(?: \[(\d+) hazards?\])?$")


def count_errors(output: str) -> int | None:
    """Errors or hazards that a tool counted; None where it gave no count."""
    counts = [int(count) for count in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", output)]
    return max(counts, default=None)


def _place(text: str) -> str:
    """A kernel and a line of its source, or the offset of an instruction where the tool knows no line."""
    found = _PLACE.match(text.strip())
    if found is None:
        return text.strip()[:80]
    # without template arguments and parameters
    name = re.sub(r"[<(].*", "", found["name"].removeprefix("void "))[:60]
    return f"{name} {found['source']}" if found["source"] else f"{name}+{found['offset']}"


def _kind(headline: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x..", headline).strip()[:90].rstrip(".")


def find_sites(output: str) -> Counter[str]:
    """How often each distinct error was printed: its kind and place -> reports, or hazards for racecheck."""
    sites: Counter[str] = Counter()
    # of the report whose details are being read: its kind, and for a race its first access
    open_report = race = None

    def close() -> None:
        if open_report is not None:
            sites[open_report] += 1

    for line in output.splitlines():
        if found := _DETAIL.match(line):
            detail = found[1].strip()
            if race is not None and (other := _RACES_WITH.match(detail)):
                sites[f"{race}, {other[1]} at {_place(other[2])}"] += int(other[3] or 1)
                open_report = None
            elif race is None and open_report is not None and detail.startswith("at "):
                sites[f"{open_report} at {_place(detail[3:])}"] += 1
                open_report = None
            elif open_report is not None and (by := re.search(r"on access by (.*)", detail)):
                sites[f"{open_report} by {by[1].rstrip('.')}"] += 1
                open_report = None
        elif (found := _HEADLINE.match(line)) and not found[1].startswith(_NOT_REPORTS):
            close()
            first = _RACE.match(found[1])
            race = f"race: {first[1]} at {_place(first[2])}" if first else None
            open_report = race or _kind(found[1])
    close()
    return sites


def describe_sites(sites: Counter[str]) -> str:
    """The sites of `find_sites`, most frequent first, as many as fit in about 300 characters."""
    parts = [f"{count} x {site}" for site, count in sites.most_common()]
    kept = 0
    while kept < len(parts) and sum(len(part) + 2 for part in parts[: kept + 1]) <= _LIMIT:
        kept += 1
    # one is always told
    kept = max(kept, 1)
    more = [f"and {len(parts) - kept} more places"] if len(parts) > kept else []
    return "; ".join([part[:_LIMIT] for part in parts[:kept]] + more)


def judge(output: str | None, returncode: int, kind: str) -> tuple[int | None, str]:
    """Errors that a tool counted, and the verdict.

    Args:
        output: of the run; None where it passed its limit.
        returncode: of the run.
        kind: "kernel", "planted" or "control".

    Returns:
        errors (None where there is no count) and "clean" or "errors" for a kernel, "seen" or "not seen" for a planted
        fault, "clean" or "false alarm" for a control, "timeout", or "failed: <reason>" where there is no count or the
        call itself failed, whatever the count: a wrong result is neither clean nor a false alarm. A planted fault may
        make its call fail.
    """
    if output is None:
        return None, "timeout"
    errors = count_errors(output)
    silent, found = _VERDICTS[kind]
    if errors and (returncode == 0 or kind == "planted"):
        return errors, found
    if errors is None or returncode != 0:
        lines = [line for line in output.splitlines() if line.strip(" =")]
        last = [line for line in lines if not line.startswith("=")] or lines or ["no output"]
        return errors, f"failed: {last[-1].strip()[:160]}"
    return 0, silent


def _of_tool(rows: list[dict], tool: object, verdict: str) -> list[str]:
    return [str(row["target"]) for row in rows if row["tool"] == tool and row["verdict"] == verdict]


def is_finding(row: dict, rows: list[dict]) -> bool:
    """Whether a row, one of `rows`, makes the command fail (see the module's docstring)."""
    if str(row["verdict"]).startswith("failed"):
        return row["kind"] != "planted"
    # the controls' mechanisms are the Hopper kernel's: they say nothing of another
    in_doubt = "hopper" in str(row["target"]) and _of_tool(rows, row["tool"], "false alarm")
    return row["verdict"] == "errors" and not in_doubt


def untrusted(rows: list[dict]) -> list[str]:
    """A line for each verdict of a tool that cannot be trusted, and why."""
    lines = []
    for tool in dict.fromkeys(row["tool"] for row in rows):
        if alarms := _of_tool(rows, tool, "false alarm"):
            doubted = [name for name in _of_tool(rows, tool, "errors") if "hopper" in name]
            lines.append(
                f"{tool}: errors in the Hopper kernel prove nothing (false alarm: {'; '.join(alarms)}); "
                f"not counted as findings: {'; '.join(doubted) or 'none'}"
            )
        if unseen := _of_tool(rows, tool, "not seen"):
            lines.append(f"{tool}: clean says nothing of what it does not see: {'; '.join(unseen)}")
    return lines
