"""The process that renders chat templates: what it is asked meanwhile does it no harm, and it does not outlive who asks."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamatrain.data.chat.builtin import CHATML
from llamatrain.data.chat.template import RendererProcess
from tests.data.chat.test_encode import HOSTILE

SLOW = "{% for i in range(1000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}" + CHATML
ASKED = {"messages": [{"role": "user", "content": "hi"}], "mode": "whole"}
REQUEST = json.dumps(ASKED).encode()


def test_a_request_that_comes_while_another_is_worked_on() -> None:
    child = RendererProcess(SLOW, {})
    assert child.process.stdin is not None
    for wait in (0.02, 0.0):
        child.process.stdin.write(REQUEST + b"\n")
        child.process.stdin.flush()
        time.sleep(wait)
    answers = [child._read_answer(time.monotonic() + 60) for _ in range(2)]
    assert [bytes(texts) for _, texts in answers] == [b"<|im_start|>user\nhi<|im_end|>\n"] * 2
    child.kill()


ASKS = """
import sys
from llamatrain.data.chat.template import RendererProcess
child = RendererProcess(sys.argv[1], {})
print(child.process.pid, flush=True)
child.request({"messages": [{"role": "user", "content": "hang"}], "mode": "whole"}, 60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals of pipes are asked of Linux")
def test_it_ends_with_who_asks_however_that_ends() -> None:
    template = "{% if messages[0].content == 'hang' %}" + HOSTILE["endless"] + "{% endif %}" + CHATML
    with subprocess.Popen([sys.executable, "-c", ASKS, template], stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        child = Path("/proc") / asking.stdout.readline().decode().strip()
        time.sleep(0.05)
        assert running(child)
        asking.kill()
    before = time.monotonic()
    while running(child) and time.monotonic() < before + 3:
        time.sleep(0.01)
    assert not running(child)


def running(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
