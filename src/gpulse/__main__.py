"""`python -m gpulse` is `gpulse`."""

from gpulse.cli.entry import main

if __name__ == "__main__":
    main()
