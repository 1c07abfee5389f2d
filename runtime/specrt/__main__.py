"""Run the command line as `python -m specrt`."""

from specrt.cli import main

main()
