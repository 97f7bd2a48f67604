"""Entry point of `python -m edged.cli`, which is the `edged` command."""

from edged.cli.main import main

main()
