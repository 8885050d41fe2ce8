"""`python -m pagefleet`: the same as the command `pagefleet`."""

from pagefleet.cli import main

if __name__ == "__main__":
    main()
