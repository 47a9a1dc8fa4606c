from tests.size import count

PLAIN = '''
"""A file."""
def f(a, b):  # a comment
    """What it does."""
    return [a, b, "a string"]
'''
SPLIT = """
def f(
    a,
    b,
):
    return [
        a,
        b,
        "a string",
    ]
"""


def test_layout_and_docstrings_are_not_counted() -> None:
    assert count(PLAIN) == count(SPLIT) == 16


def test_code_is_counted() -> None:
    assert count("x = 1\n") == 3
    assert count("x = ('a' 'b')\n'a docstring'\n") == 6
