"""Generated parts of pages, which stand between two marks."""


def between(page: str, marks: tuple[str, str], text: str) -> str:
    """Return a page with this text between its marks, each of which is a line.

    Raises:
        ValueError: The page lacks one of them.
    """
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {marks[0]!r} and {marks[1]!r}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
