"""Runs `llamatrain` and `python -m llamatrain`. From the first line on, a signal ends the program quietly."""

import os
from types import FrameType


def main() -> None:
    """Run the command line."""
    # What is behind `signal`, which takes a while to load: until then Python itself tells of an interrupt.
    import _signal  # type: ignore[import-not-found]

    for number in (_signal.SIGINT, _signal.SIGTERM):
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, leave)
    from llamatrain.cli.main import main
    from llamatrain.platform.exit import install_exit_handlers

    install_exit_handlers()
    try:
        main()
    finally:
        end_with_torch()


def end_with_torch() -> None:
    """Exit at once with the status of the command if it used torch, whose threads abort a normal exit."""
    import sys

    status = sys.exc_info()[1]
    if "torch" in sys.modules and isinstance(status, SystemExit) and isinstance(status.code, int):
        from llamatrain.platform.exit import clean_up

        clean_up()
        os._exit(status.code)


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once, before there is anything to clean up."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
