"""`python -m anybit.cli`."""

from anybit.cli import main

main()
