"""`python -m torchdelta` is the command line."""

from torchdelta.cli import main

if __name__ == "__main__":
    main()
