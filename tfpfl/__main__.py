"""`python -m tfpfl`."""

from tfpfl.cli import main

if __name__ == "__main__":
    main()
