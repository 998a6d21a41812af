"""`python -m jigsawrl` is the `jigsaw` command."""

from jigsawrl.cli import main

if __name__ == "__main__":
    main()
