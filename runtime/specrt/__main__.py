"""The entry point of `python -m specrt` and of the installed command."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C around its verbs prints one line, with status 130."""
    try:
        from specrt.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("specrt: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
