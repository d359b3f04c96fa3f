"""Code that the command lines of the examples share: whole numbers with a minimum, and errors of one line."""

import argparse
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        fail(self.prog, f"{message} (see --help)")


class CountFrom:
    """A converter of arguments that must be whole numbers of at least ``least``."""

    def __init__(self, least: int) -> None:
        self._least = least
        self.__name__ = f"whole number from {least} up"  # argparse shows it when int() fails

    def __call__(self, text: str) -> int:
        number = int(text)
        if number < self._least:
            raise argparse.ArgumentTypeError(f"must be at least {self._least}, got {number}")
        return number


def fail(program: str, message: str) -> NoReturn:
    """Exit with status 2, which means a wrong command line, and print the reason in one line."""
    print(f"{program}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
