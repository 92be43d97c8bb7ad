"""Code by its tests: what the model wrote is run in the sandbox, never here."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.rewards.sandbox import Limits, protections, run_python
from grpo_jax.rollouts.rewards import Completion

_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)

# Says how many tests have passed after each of them, behind a word that no name leads the solution to: one that prints,
# or that leaves with exit code 0 before its tests, has passed none.
_HARNESS = """
def main():
    import io, json, os, sys
    job, report = json.load(sys.stdin), os.dup(1)
    write, leave, run, compiled = os.write, os._exit, exec, compile
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    space, passed, word, tests = {"__name__": "solution"}, 0, job["word"], job["tests"]
    solution = compiled(job["solution"], "solution.py", "exec")
    del job
    run(solution, space)
    for number, test in enumerate(tests):
        try:
            run(compiled(test, f"test_{number}.py", "exec"), space)
            passed += 1
        except BaseException:
            pass
        write(report, f"{word} {passed}\\n".encode())
    leave(0)
main()
"""


def passes_tests(
    completion: Completion,
    tests: str | None = None,
    setup: str | None = None,
    partial: bool = False,
    max_tests: int = 100,
    cpu_s: int = 5,
    wall_s: float = 8.0,
    memory_mb: int = 512,
) -> dict[str, float | None]:
    """1 if the code passes all tests, else 0 (with `partial`: the part that it passes). `passed` is recorded.

    The code is the last fenced block of the text without its thinking part, or all of it where there is none. Tests
    that are code (`assert f(2) == 3`) run one after another with the code's names; tests that are {"input", "output"}
    each run it as a program, and compare what it prints up to white space. Tests that are code share a process with the
    solution: what looks for a way around them (an object that is equal to everything, the frames of its caller) finds
    one, and only programs that are judged by their output do not. Give the reward a `timeout_s` above what
    its tests may take: `wall_s`, for each input where tests have inputs.

    Args:
      tests: the metadata's key that holds them; None: the problem's answer.
      setup: the metadata's key of code that runs before the solution's (imports).
      cpu_s, wall_s, memory_mb: limits of each run.
    """
    protections()
    wanted = _tests(completion.answer if tests is None else completion.metadata[tests])[:max_tests]
    if not wanted:
        raise ValueError("the problem has no tests")
    before = "" if setup is None else f"{completion.metadata[setup]}\n"
    found = _FENCED.findall(completion.answer_text)
    source = before + (found[-1] if found else completion.answer_text)
    limits = Limits(cpu_s=cpu_s, wall_s=wall_s, memory_mb=memory_mb)
    if all(isinstance(test, str) for test in wanted):
        passed = _passed_asserts(source, wanted, limits)
    else:
        passed = _passed_inputs(source, wanted, limits, to_the_end=partial)
    part = passed / len(wanted)
    return {"reward": part if partial else float(part == 1.0), "passed": part}


def _passed_asserts(source: str, tests: Sequence[str], limits: Limits) -> int:
    word = secrets.token_hex(16)
    job = {"solution": source, "tests": list(tests), "word": word}
    outcome = run_python(_HARNESS, json.dumps(job), limits)
    counts = re.findall(rf"^{word} (\d+)$", outcome.stdout, re.MULTILINE)
    return int(counts[-1]) if counts else 0


def _passed_inputs(source: str, tests: Sequence[Mapping[str, Any]], limits: Limits, to_the_end: bool) -> int:
    passed = 0
    for test in tests:
        outcome = run_python(source, str(test["input"]), limits)
        if outcome.ended == "exit 0" and outcome.stdout.split() == str(test["output"]).split():
            passed += 1
        elif not to_the_end:
            break
    return passed


def _tests(given: Any) -> list[Any]:
    """Tests as a list: one text, a list, or APPS' {"inputs": […], "outputs": […]}; JSON texts of these, too."""
    if isinstance(given, str):
        try:
            read = json.loads(given)
        except ValueError:
            return [given]
        return _tests(read) if isinstance(read, list | dict) else [given]
    if isinstance(given, Mapping):
        if "inputs" not in given:
            return [given]
        return [{"input": i, "output": o} for i, o in zip(given["inputs"], given["outputs"], strict=True)]
    return list(given or ())


def _unusable(answer: Any) -> str | None:
    """Of tests that are the answer; where `tests` names a key of the metadata, the answer may be anything."""
    if answer is None:
        return None
    for test in _tests(answer):
        if isinstance(test, str):
            try:
                compile(test, "test", "exec")
            except (SyntaxError, ValueError) as error:
                return f"the test {test!r:.80} is no Python: {error}"
        elif not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
            return f"{test!r:.80} is neither a test's code nor its input and output"
    return None


passes_tests.check_answer = _unusable  # type: ignore[attr-defined]
