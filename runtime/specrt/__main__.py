"""The entry point of `python -m specrt` and of the installed command."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported prints one line, with status 130."""
    try:
        from specrt.cli import main as run_command_line
    except KeyboardInterrupt:
        sys.stderr.write("specrt: interrupted\n")
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
