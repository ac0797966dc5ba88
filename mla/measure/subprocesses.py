"""Child processes: a gate a contestant, a timing run a shape, a pipeline a model, a process a question of a study."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
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


def answers_in_fresh_processes(
    module: str, requests: Iterable[dict[str, object]], *, timeout_s: float, environment: dict[str, str] | None = None
) -> Iterator[tuple[dict[str, object], object | None, str]]:
    """Have each request answered by a process of its own, one at a time; the next one imports meanwhile.

    Args:
        module: run as `python -m`; reads one JSON request from stdin and prints the answer as the last line.
        requests: what to ask.
        timeout_s: limit of one answer.
        environment: variables of the processes, beside this one's.

    Yields:
        (request, answer, ""), or (request, None, reason) where a process hangs or crashes.
    """

    def start() -> subprocess.Popen:
        # a group of its own: a compiler's workers hold the pipes open after their parent was killed
        return subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip

    requests = list(requests)
    processes = [start()] if requests else []
    try:
        for i, request in enumerate(requests):
            if i + 1 < len(requests):
                processes.append(start())
            process = processes.pop(0)
            answer, reason = None, ""
            try:
                stdout, stderr = process.communicate(json.dumps(request), timeout=timeout_s)
                if process.returncode == 0:
                    answer = json.loads(stdout.strip().splitlines()[-1])
                else:
                    reason = f"failed: the process ended with code {process.returncode}: {_last_line(stderr)}"
            except subprocess.TimeoutExpired:
                reason = f"failed: no answer within {timeout_s:.0f} s"
            finally:
                _end(process)
            yield request, answer, reason
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process and what it started, where they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            stream.close()
    process.wait()


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
    request = json.dumps({"cases": [asdict(case)], "names": names, "timers": timers, "seed": seed})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla.measure.worker"], input=request, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])[0]
        reason = f"failed: the timing process ended with code {done.returncode}: {_last_line(done.stderr)}"
    except subprocess.TimeoutExpired:
        reason = f"failed: not timed within {timeout_s:.0f} s"
    return [{"implementation": n, "timer": t, "status": reason} for n in names for t in timers]
