"""Run the command line with `python -m gpulse`."""

from gpulse.cli.entry import main

if __name__ == "__main__":
    main()
