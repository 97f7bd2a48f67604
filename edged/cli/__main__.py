"""`python -m edged.cli` is the `edged` command."""

from edged.cli.main import main

main()
