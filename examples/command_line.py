"""What the examples' command lines share: whole numbers with a least value, and errors of one line."""

import argparse
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        fail(self.prog, f"{message} (see --help)")


class CountFrom:
    """Converts a whole number that is at least ``least``."""

    def __init__(self, least: int) -> None:
        self._least = least
        self.__name__ = f"whole number from {least} up"  # argparse shows it when int() fails

    def __call__(self, text: str) -> int:
        number = int(text)
        if number < self._least:
            raise argparse.ArgumentTypeError(f"must be at least {self._least}, got {number}")
        return number


def fail(program: str, message: str) -> NoReturn:
    """End with the exit status of a wrong call, and one line that says why."""
    print(f"{program}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
