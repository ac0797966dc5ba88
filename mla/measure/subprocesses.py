"""The benchmark's child processes: a gate a contestant, a timing run a shape, a pipeline a model."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict

from mla.measure.cases import Case
from mla.measure.gate import Verdict


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "no message"


def _forward_lines(stream, begins: str, answers: queue.Queue) -> None:
    """Every line that is an answer (others may print as well), then None at the end of the stream."""
    for line in stream:
        if line.startswith(begins):
            answers.put(line)
    answers.put(None)


def answers_in_process(
    command: list[str], requests: list[object], *, begins: str, timeout_s: float
) -> Iterable[tuple[object, dict | None, str]]:
    """Put requests to a process that answers them in turn.

    A request that hangs or crashes the process has failed; the rest go to a new process.

    Args:
        command: of the process, which reads a JSON request a line and prints a JSON answer a line.
        requests: dataclass instances.
        begins: how an answer's line begins.
        timeout_s: limit of one request, the process's start and compilation included.

    Yields:
        The request, its answer or None, and why there is none.
    """
    remaining = list(requests)
    while remaining:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            answers, errors = queue.Queue(), []
            readers = [
                threading.Thread(target=_forward_lines, args=(process.stdout, begins, answers)),
                threading.Thread(target=lambda stream, kept: kept.append(stream.read()), args=(process.stderr, errors)),
            ]
            for reader in readers:
                reader.start()
            process.stdin.write("".join(json.dumps(asdict(request)) + "\n" for request in remaining))
            process.stdin.close()
            while remaining:
                try:
                    answer = answers.get(timeout=timeout_s)
                except queue.Empty:
                    process.kill()
                    yield remaining.pop(0), None, f"failed: no answer within {timeout_s:.0f} s"
                    break
                if answer is None:
                    process.wait()
                    readers[1].join()
                    reason = f"failed: the process ended with code {process.returncode}: {_last_line(errors[0])}"
                    yield remaining.pop(0), None, reason
                    break
                yield remaining.pop(0), json.loads(answer), ""


def gate_in_process(
    name: str, cases: Iterable[Case], *, device: str, seed: int, timeout_s: float
) -> Iterable[tuple[Case, Verdict]]:
    """Check one implementation on some cases in a process of its own.

    A case that hangs or crashes the process is a failure of that case; the rest go to a new process.

    Args:
        name: implementation id.
        cases: what to check.
        device: "cuda" or "cpu".
        seed: of the data.
        timeout_s: limit of one case, the process's start and compilation included.

    Yields:
        A verdict a case, in order.
    """
    command = [sys.executable, "-m", "mla.measure.gate", name, device, str(seed)]
    for case, answer, reason in answers_in_process(command, list(cases), begins='{"rel_err"', timeout_s=timeout_s):
        yield case, Verdict(None, False, reason) if answer is None else Verdict(**answer)


def time_in_process(
    case: Case, names: list[str], *, timers: list[str], seed: int, timeout_s: float
) -> list[dict[str, object]]:
    """Time all contestants of one case together in a process of its own.

    Returns:
        The worker's rows; where the process hangs or crashes, rows that say so.
    """
    request = json.dumps({"case": asdict(case), "names": names, "timers": timers, "seed": seed})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla.measure.worker"], input=request, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
        reason = f"failed: the timing process ended with code {done.returncode}: {_last_line(done.stderr)}"
    except subprocess.TimeoutExpired:
        reason = f"failed: not timed within {timeout_s:.0f} s"
    return [{"implementation": n, "timer": t, "status": reason} for n in names for t in timers]
