"""Rewards that work, and those that hang, raise, die, or return what is no number."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamatrain.config.units import Duration, Size
from llamatrain.errors import LlamatrainError, MissingError
from llamatrain.platform.terminal import show_log
from llamatrain.rewards.options import RewardOptions
from llamatrain.rewards.processes import Answer, RewardError
from llamatrain.rewards.scorer import Scorer
from tests.helpers.errors import raises

ANSWERS = [Answer(f"{n}+1=", str(n), {"x": n, "answer": "gold"}, f"data.jsonl:{n + 1}") for n in range(3)]
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="these commands are for a Unix shell")
EACH = "def reward(prompt, answer, row):\n    "


def options(
    place: Path, source: str, *more: str, failed: float | None = None, weights: str = ""
) -> RewardOptions:
    """Return the options of rewards whose Python sources are given."""
    files = []
    for number, text in enumerate((source, *more)):
        files.append(place / f"reward{number}.py")
        files[-1].write_text(text)
    told = RewardOptions(
        reward=tuple(map(str, files)),
        reward_timeout=Duration(1),
        reward_memory=Size(500_000_000),
        reward_failed=failed,
        reward_weights=weights,
    )
    told.validate()
    return told


def scores(told: RewardOptions, answers: list[Answer] = ANSWERS) -> list[float]:
    with Scorer(told) as scorer:
        scorer.start()
        return scorer.score(answers)


def run_command(command: str) -> list[float]:
    return scores(RewardOptions(reward=(command,), reward_timeout=Duration(1)))


@pytest.mark.parametrize(
    "source",
    [
        EACH + "return row['x'] + len(prompt)",
        "def reward(completions, x, **columns): return [a + len(p) for a, p in zip(x, columns['prompts'])]",
        "def reward(prompts, completions): return [int(a) + len(p) for a, p in zip(completions, prompts)]",
        EACH + "print('noise'); import os; os.system('echo 17'); return row['x'] + 4",
        EACH + "return row['x'] + int(open('/dev/stdin').read() or 4)",
        "from fractions import Fraction\n" + EACH + "return Fraction(row['x'] + 4)",
    ],
    ids=["each", "columns", "batch", "prints", "reads", "fraction"],
)
def test_a_file_scores_answers(tmp_path: Path, source: str) -> None:
    told = options(tmp_path, source)
    with Scorer(told) as scorer:
        assert scorer.score(ANSWERS) == scorer.score(ANSWERS) == [4, 5, 6]
        assert scorer.score([]) == []


def test_the_row_has_its_own_answer(tmp_path: Path) -> None:
    assert scores(options(tmp_path, EACH + "return (row['answer'] == 'gold') - (answer == 'gold')")) == [
        1,
        1,
        1,
    ]


def test_weights_of_several_rewards(tmp_path: Path) -> None:
    told = options(tmp_path, EACH + "return 1", EACH + "return row['x']", weights="1,-0.5")
    assert scores(told) == [1, 0.5, 0]
    told = options(tmp_path, EACH + "return 1", EACH + "return row['x']")
    assert scores(told) == [1, 2, 3]


@POSIX
def test_a_command_scores_answers() -> None:
    code = 'import sys, json\nfor line in sys.stdin: print(json.loads(line)[\\"row\\"][\\"x\\"] / 2)'
    assert run_command(f'{sys.executable} -c "{code}"') == [0, 0.5, 1]
    assert run_command("sed 's/.*/{\"reward\": 2}/'") == [2, 2, 2]


# ---- what goes wrong ----------------------------------------------------------------

BROKEN = {
    "raises": ("return 1 / int(answer)", "line 2: ZeroDivisionError"),
    "exits": ("raise SystemExit", "SystemExit"),
    "hangs": ("\n    while True: pass", "no number for 1 s"),
    "sleeps": ("import time; time.sleep(99)", "no number for 1 s"),
    "ignores signals": (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)",
        "no number for 1 s",
    ),
    "dies": ("import os; os._exit(3)", "exit code 3"),
    "ends": ("import os; os._exit(0)", "ended after 0 numbers"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    "takes memory": ("return len('a' * 10**10)", "MemoryError"),
    "recurses": ("return reward(prompt, answer, row)", "RecursionError"),
    "nan": ("return float('nan')", "it returned nan"),
    "infinity": ("return 1e999", "it returned inf"),
    "too large": ("return 1e308", r"it returned 1e\+308; a reward must be between"),
    "nothing": ("return", "None"),
    "text": ("return '1'", "'1'"),
    "long text": ("return 'x' * 10**7", "xxx..."),
    "list": ("return [1, 2]", r"\[1, 2\]"),
    "large number": ("return 10**400", "number"),
    "object": ("\n    class Odd:\n        def __repr__(self): raise ValueError\n    return Odd()", "Odd"),
    "odd error": (
        "\n    class Odd(Exception):\n        def __str__(self): raise ValueError\n    raise Odd",
        "Odd",
    ),
    "closes its output": ("import os; os.closerange(3, 99); return 1", "it ended"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are those of Unix")
def test_a_failure_stops_and_names_the_row(tmp_path: Path, name: str) -> None:
    body, problem = BROKEN[name]
    started = time.monotonic()
    with raises("reward-failed", RewardError, match=problem) as info:
        scores(options(tmp_path, EACH + body))
    message = str(info.value)
    assert "\n" not in message and len(message) < 1000
    assert "reward0.py" in message
    assert name == "ends" or "data.jsonl:1" in message
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "body", ["1 / (row['x'] - 1)", "[2, float('nan'), 2][row['x']]"], ids=["raises", "nan"]
)
def test_failures_may_have_a_reward(tmp_path: Path, body: str) -> None:
    warnings: list[str] = []
    with Scorer(options(tmp_path, EACH + f"return abs({body}) * 3", failed=-1), warnings.append) as scorer:
        first, second = scorer.score(ANSWERS), scorer.score(ANSWERS)
    assert first == second and first[1] == -1 and first[0] == first[2] > 0
    assert scorer.failed == 2 and "1 of 3" in warnings[0] and "2 so far" in warnings[1]
    assert "data.jsonl:2" in warnings[0]


def test_after_a_hang_the_rest_is_scored(tmp_path: Path) -> None:
    told = options(tmp_path, EACH + "\n    while row['x'] == 1: pass\n    return row['x']", failed=9)
    with Scorer(told, lambda line: None) as scorer:
        assert scorer.score(ANSWERS) == [0, 9, 2]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def reward(prompt", "line 1: SyntaxError"),
        ("import no_such_module", "line 1: ModuleNotFoundError"),
        ("x = 1", "no function reward"),
        ("reward = 3", "no function reward"),
        ("import sys; sys.exit(4)", "SystemExit"),
        ("import os; os._exit(4)", "exit code 4"),
        ("\x00", "null bytes"),
        ("def reward(): return 1", "takes 0 positional"),
        ("def reward(completions, **rest): return [1]", "1 rewards for 3 answers"),
        ("def reward(completions, **rest): return None", "not iterable"),
        ("async def reward(prompt, answer, row): return 1", "coroutine"),
    ],
)
def test_broken_files(tmp_path: Path, source: str, problem: str) -> None:
    with raises("reward-failed", RewardError, match=problem) as info:
        scores(options(tmp_path, source))
    assert "\n" not in str(info.value)


@POSIX
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("cat > /dev/null; printf '1\\n2\\n'", "after 2 numbers for 3"),
        ("cat > /dev/null; printf '1\\n2\\n3\\n4\\n'", "more than 3"),
        ("cat > /dev/null; printf '1\\n2\\n3\\n'; exit 3", "exit code 3"),
        ("cat > /dev/null; printf '1 2 3'", "'1 2 3'"),
        ("cat > /dev/null; printf '1\\nnan\\n3\\n'", "'nan'"),
        ("cat > /dev/null; printf '1\\nNaN\\n3\\n'", "nan"),
        ("cat > /dev/null; printf '1\\ntrue\\n3\\n'", "'true'"),
        ("cat > /dev/null; printf '1\\n{}\\n3\\n'", "'{}'"),
        ("cat > /dev/null; printf '\\377\\n'", "instead of a number"),
        ("head -c 300000 /dev/zero | tr '\\0' '['", "too long"),
        ("yes", "'y'"),
        ("cat", "prompt"),
        ("true", "after 0 numbers"),
        ("no-such-command", "not found"),
        ("sleep 99", "no number for 1 s"),
        ("sleep 99 & sed s/.*/1/", "no number for 1 s"),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_broken_commands(command: str, problem: str) -> None:
    with raises("reward-failed", RewardError, match=problem):
        run_command(command)


@POSIX
def test_large_requests_and_early_output() -> None:
    told = RewardOptions(reward=("yes 1 | head -n 3; cat > /dev/null",), reward_timeout=Duration(20))
    large = [Answer("x" * 10**6, "y" * 10**6)] * 3
    assert scores(told, large) == [1, 1, 1]


def test_output_for_people_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with show_log():
        scores(options(tmp_path, EACH + "print('scoring', answer); return 1"))
    assert "scoring 2" in capfd.readouterr().err


# ---- processes ------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Return True if a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: object, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(done)


SPAWNS = """
import subprocess, pathlib
child = subprocess.Popen(["sleep", "99"])
pathlib.Path(__file__).with_name("pids").write_text(f"{child.pid} {__import__('os').getpid()}")
def reward(prompt, answer, row):
    while row["x"] == 1: pass
    return 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", ["close", "hang"])
def test_children_of_a_reward_end_with_it(tmp_path: Path, ends: str) -> None:
    told = options(tmp_path, SPAWNS)
    if ends == "hang":
        with raises("reward-failed"):
            scores(told)
    else:
        scores(told, ANSWERS[:1])
    pids = [*map(int, (tmp_path / "pids").read_text().split())]
    assert wait_for(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rewards_end_with_a_killed_program(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SPAWNS)
    code = (
        "from llamatrain.rewards.options import RewardOptions\nfrom llamatrain.rewards.scorer import Scorer\n"
        f"from llamatrain.rewards.processes import Answer\nScorer(RewardOptions(reward=({str(tmp_path / 'reward.py')!r},)))"
        '.score([Answer("", "", {"x": 1})])'
    )
    program = subprocess.Popen([sys.executable, "-c", code])
    assert wait_for((tmp_path / "pids").is_file)
    assert wait_for(lambda: len((tmp_path / "pids").read_text().split()) == 2)
    pids = [*map(int, (tmp_path / "pids").read_text().split())]
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    assert wait_for(lambda: not any(map(is_running, pids)))


# ---- options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "match"),
    [
        (MissingError, {"reward": ("no/such/file.py",)}, "no/such/file.py"),
        (LlamatrainError, {"reward": ("true",), "reward_weights": "1,2"}, "1 .got 2"),
        (LlamatrainError, {"reward": ("true", "true"), "reward_weights": "1"}, "2 .got 1"),
        (LlamatrainError, {"reward": ("true",), "reward_weights": "1e99"}, "1e99"),
    ],
)
def test_options(kind: type[LlamatrainError], values: dict[str, object], match: str) -> None:
    with pytest.raises(kind, match=match):
        RewardOptions(**values).validate()  # type: ignore[arg-type]
